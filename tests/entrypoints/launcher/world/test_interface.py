"""Which interface leads to the other nodes, and a lease that nobody renews."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launcher.stdin import Lease
from launcher.world.interface import towards

from cloudtrain.testing.clock import VirtualClock

ROOM = Path(__file__).parents[4] / "entrypoints"


def test_this_machine():
    assert towards("127.0.0.1") == "lo"
    assert towards("no-such-host.invalid") == ""


def test_between_hosts(lab):
    first, second = lab.hosts[:2]
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from launcher.world.interface import towards; print(towards(sys.argv[2]))"
    )
    for address in (first.address, second.address, first.name):  # its own too: node 0 asks for itself
        assert first.run([sys.executable, "-c", script, str(ROOM), address]).strip() == "eth0", address


def test_lease(tmp_path):
    clock = VirtualClock()
    assert Lease.of({"CLOUDTRAIN_NODE_DIR": str(tmp_path)}) is None
    lease = Lease.of({"CLOUDTRAIN_NODE_DIR": str(tmp_path), "CLOUDTRAIN_LEASE_S": "60"}, clock)
    assert lease is not None and not lease.over()  # it begins with the job, before anybody has looked
    for hour in (9, 3, 5):  # whatever time the file has: only that it changes counts
        clock.sleep(59)
        (tmp_path / "lease").touch()
        os.utime(tmp_path / "lease", (hour * 3600, hour * 3600))
        assert not lease.over()
    clock.sleep(61)
    assert lease.over()
