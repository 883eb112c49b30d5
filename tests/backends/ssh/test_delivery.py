"""The source on its way to three real hosts: the bytes that leave this machine, and a network that lets hosts not talk."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.backends.ssh.machines import Machine
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.nodes import transfer
from cloudtrain.nodes.agents import call_all
from cloudtrain.source.bundle import Bundle
from tests.backends.ssh.test_backend import options
from tests.backends.ssh.test_faults import job_of, until_final
from tests.lab.connections import close_all
from tests.lab.network import Lab

SIZE = 8 << 20


@pytest.fixture(autouse=True)
def _connections(lab: Lab, census: Path):
    yield
    close_all()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").write_bytes(Random(8).randbytes(SIZE))
    (folder / "script.py").write_text("import os; print(os.path.getsize('weights'))")
    return folder


def bytes_sent(lab: Lab) -> int:
    """Return the bytes that this machine has sent into the lab's network."""
    return int(Path(f"/sys/class/net/ctlab{lab.number}/statistics/tx_bytes").read_text())


def test_one_upload_for_three_hosts(lab, source, tmp_path, home):
    backend = SshBackend(options(lab, 3), home / "runs")
    bundle = Bundle.make(source, tmp_path / "bundles")
    job = Job.from_dict(job_of(source, num_nodes=3))
    before = bytes_sent(lab)
    handle = backend.submit(backend.plan(job, bundle, "ship-1"), bundle)
    assert SIZE < bytes_sent(lab) - before < 1.5 * SIZE
    assert until_final(backend, handle).state is State.SUCCEEDED
    assert [line.text for line in backend.logs(handle) if line.rank >= 0] == [str(SIZE)] * 3
    assert len({host.path(f"/root/.cloudtrain/src/{bundle.sha256}.tar.gz").read_bytes() for host in lab.hosts}) == 1


def test_hosts_that_do_not_reach_each_other_get_it_from_here(lab, source, tmp_path, caplog):
    for host in lab.hosts:
        for other in lab.hosts:
            if other is not host:
                host.run(["ip", "route", "add", "unreachable", f"{other.address}/32"])
    try:
        more = options(lab, 3)
        machines = [Machine(more, host) for host in more["hosts"]]
        bundle = Bundle.make(source, tmp_path / "bundles")
        distribution = transfer.Distribution("/root/x", bundle, True, True)
        arguments = {"root": "/root/x", "sha256": bundle.sha256, "into": "/root/x/source"}
        before = bytes_sent(lab)
        work = [(machine, lambda it=machine: it.agent.ask("extract", **arguments)) for machine in machines]
        assert call_all(lambda it: distribution.bring(it[0], False, it[1]), work) == [None] * 3
        distribution.report()
        assert bytes_sent(lab) - before > 3 * SIZE
        assert {os.path.getsize(host.path("/root/x/source/weights")) for host in lab.hosts} == {SIZE}
        (line,) = [line for line in caplog.messages if "did not get it from another one" in line]
        assert "2 machines" in line and "No route to host" in line
    finally:
        for host in lab.hosts:
            for other in lab.hosts:
                host.run(["ip", "route", "del", "unreachable", f"{other.address}/32"], check=False)
