"""The lab is what it says: separate machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.conftest import wait_for
from tests.lab.fixtures import need
from tests.lab.host import REPOSITORY
from tests.lab.network import Lab


def test_hosts_are_machines_of_their_own(lab: Lab) -> None:
    first, second, third = lab.hosts
    said = [lab.ssh(host, ["hostname; cat /proc/sys/kernel/random/boot_id; hostname -I"]).split() for host in lab.hosts]
    assert [words[0] for words in said] == ["node-1", "node-2", "node-3"]
    assert len({words[1] for words in said}) == 3, "boot ids differ"
    assert [words[2] for words in said] == [host.address for host in lab.hosts]
    for folder in ("/root", "/tmp", "/run", "/dev/shm", "/var/log"):
        first.run(["sh", "-c", f"echo mine > {folder}/only-on-one"])
        assert first.run(["cat", f"{folder}/only-on-one"]) == "mine\n"
        for other in (second, third):
            assert "only-on-one" not in other.run(["ls", folder])
        assert not os.path.exists(f"{folder}/only-on-one"), "nor does this machine"
    for folder in ("/etc", "/usr/local", "/opt", os.path.dirname(__file__)):
        refused = first.run(["sh", "-c", f"echo x > {folder}/only-on-one || true; ls {folder}"])
        assert "only-on-one" not in refused, f"{folder} is the same on all hosts and must be read-only"
    first.run(["sh", "-c", f"echo all > {lab.shared}/seen"])
    assert second.run(["cat", f"{lab.shared}/seen"]) == (lab.shared / "seen").read_text() == "all\n"
    sleeper = subprocess.Popen(["nsenter", f"--target={second.pid}", "--all", "sleep", "600"])
    wait_for(lambda: second.processes(containing="sleep 600"), "the process")
    assert not first.processes(containing="sleep 600")
    assert "sleep 600" not in first.run(["ps", "-e", "-o", "args"])
    sleeper.kill()
    for pid in second.processes():
        os.kill(pid, signal.SIGKILL)
    sleeper.wait()
    ours = first.run([sys.executable, "-c", "import sys, cloudtrain; print(sys.prefix, cloudtrain.__name__)"])
    assert ours.split() == [sys.prefix, "cloudtrain"]


def test_cut_and_healed(lab: Lab) -> None:
    first, second, _ = lab.hosts
    code = f"import socket; socket.create_connection(('{second.address}', 22), 2); print('reached')"
    reach = [sys.executable, "-c", code]
    assert first.run(reach) == "reached\n"
    first.cut()
    assert first.run(reach, check=False) == ""
    first.heal()
    wait_for(lambda: first.run(reach, check=False), "the link")


def test_rebooted(lab: Lab) -> None:
    host = lab.hosts[2]
    host.run(["sh", "-c", "echo kept > /root/kept; echo gone > /tmp/gone"])
    subprocess.Popen(["nsenter", f"--target={host.pid}", "--all", "sleep", "601"])
    wait_for(lambda: host.processes(containing="sleep 601"), "the process")
    before = host.run(["cat", "/proc/sys/kernel/random/boot_id"])
    host.reboot()
    assert host.run(["cat", "/proc/sys/kernel/random/boot_id"]) != before
    assert host.files("/root") == ["kept"] and host.files("/tmp") == []
    assert host.processes() == {}
    assert lab.ssh(host, ["cat", "/root/kept"]) == "kept\n"
    host.path("/root/kept").unlink()


def test_full_disk_and_another_key(lab: Lab) -> None:
    host = lab.hosts[0]
    host.fill()
    assert "No space left" in host.run(["sh", "-c", "dd if=/dev/zero of=/root/x bs=1M count=1 2>&1; rm /root/x"])
    host.free()
    host.run(["sh", "-c", "dd if=/dev/zero of=/root/x bs=1M count=1 2>&1; rm /root/x"])
    host.new_host_key()
    try:
        lab.ssh(host, ["true"])
    except AssertionError as error:
        assert "IDENTIFICATION HAS CHANGED" in str(error)
    else:
        raise AssertionError("ssh took another key")
    lab.write_known_hosts()
    lab.ssh(host, ["true"])


def test_nothing_outlives_a_killed_test_run() -> None:
    need("sshd", "ip")
    code = (
        "import sys\n"
        "from tests.lab.network import Lab\n"
        "lab = Lab(hosts=1)\n"
        "print(lab.hosts[0].pid, lab.number, flush=True)\n"
        "sys.stdin.read()\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True, cwd=REPOSITORY)
    pid, number = run.stdout.readline().split()
    assert os.path.exists(f"/proc/{pid}") and os.path.exists(f"/sys/class/net/ctlab{number}")
    run.kill()
    run.wait()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the host's end")
    wait_for(lambda: not os.path.exists(f"/sys/class/net/ctlab{number}"), "the cable's end")
    Lab(hosts=0).close()
    assert not os.path.exists(f"/tmp/cloudtrain-lab/{number}"), "the next one removes its files"
