"""Two users and the two GPUs of one host: real supervisors, a driver's tool that shows what the test says."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for
from tests.lab.connections import close_all
from tests.lab.network import Lab

# Holds its GPU until the test removes its file.
HOLDS = """
import os, time
print("SEES", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"], flush=True)
while not os.path.exists(os.environ["UNTIL"]):
    time.sleep(0.05)
"""
SMI = """#!/bin/sh
case "$1" in
-L) for n in 0 1; do echo "GPU $n: NVIDIA A100 (UUID: GPU-$n-$(hostname))"; done;;
--query-gpu=*) cat {shared}/filled;;
esac
"""


class Users:
    """Jobs of ann and bob on hosts of the lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self._folder = lab, folder
        self.tools = lab.shared / "gpus"
        self.tools.mkdir(exist_ok=True)
        (self.tools / "nvidia-smi").write_text(SMI.format(shared=self.tools))
        (self.tools / "nvidia-smi").chmod(0o755)
        self.fill("")
        for host in lab.hosts:
            for name in ("ann", "bob"):
                host.run(["sh", "-c", f"mkdir -p /home/{name}; chown {name} /home/{name}; chmod 711 /root"])

    def fill(self, text: str) -> None:
        """Show `text` as what other programs use."""
        (self.tools / "filled").write_text(text)

    def submit(self, user: str, name: str, hosts: tuple[int, ...] = (0,), gpus: int = 1, roles=None, **limits: str):
        """Submit a job that holds its GPUs until `end(name)`; return its backend and handle."""
        access = {"user": user, "identity": str(self.lab.key), "known_hosts": str(self.lab.known_hosts)}
        setup = [f"export PATH={self.tools}:$PATH"]
        addresses = [{"address": self.lab.hosts[number].address} for number in hosts]
        backend = SshBackend({"hosts": addresses, **access, "python": sys.executable, "setup": setup}, self._folder)
        source = self._folder / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text(HOLDS)
        job = Job.from_dict(
            {
                "name": name,
                "source": str(source),
                "entrypoint": "train.py",
                **({"roles": roles} if roles else {"num_nodes": len(hosts)}),
                "resources": {"accelerators": f"A100:{gpus}"},
                "env": {"UNTIL": str(self.tools / name), "CUDA_VISIBLE_DEVICES": "7"},
                "limits": limits,
            }
        )
        plan = backend.plan(job, bundle := Bundle.make(source, self._folder / "bundles"), name)
        return backend, backend.submit(plan, bundle)

    def end(self, name: str) -> None:
        (self.tools / name).touch()


@pytest.fixture
def users(lab: Lab, tmp_path: Path):
    made = Users(lab, tmp_path)
    yield made
    close_all()
    for host in lab.hosts:
        for pid in host.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        host.run(["sh", "-c", "rm -rf /home/ann /home/bob /tmp/cloudtrain-gpu* /tmp/.cloudtrain-gpu*"])


def until(job, state: State, word: str = ""):
    backend, handle = job

    def reached():
        status = backend.status(handle)
        assert not status.state.final or state.final, status
        return status if status.state is state and word in status.reason else None

    return wait_for(reached, f"{state} {word}")


def sees(job) -> str:
    """Return the GPUs that a running job was given; its own choice of another is not heard."""
    until(job, State.RUNNING)
    backend, handle = job

    def lines() -> list[str]:
        return [line.text for line in backend.logs(handle) if line.text.startswith("SEES")]

    _, gpus, order = wait_for(lines, "its first line")[0].split()
    assert order == "PCI_BUS_ID"
    return gpus


def test_jobs_of_two_users_have_a_gpu_each_and_the_third_waits_its_turn(users: Users) -> None:
    first = users.submit("ann", "first")
    assert sees(first) == "0"
    second = users.submit("bob", "second")
    assert sees(second) == "1"
    third = users.submit("ann", "third", gpus=2)
    waits = until(third, State.QUEUED, "first in the queue for 2 of 2 GPUs of node-1, 0 free")
    assert waits.started_at is None, "its wait costs no time"
    fourth = users.submit("bob", "fourth")
    until(fourth, State.QUEUED, "number 2 in the queue for 1 of 2 GPUs of node-1")
    at_once = users.submit("bob", "at-once", max_wait="0")
    ended = until(at_once, State.TIMED_OUT)
    assert "no GPUs were free within limits.max_wait" in ended.reason and ended.started_at is None
    assert any("number 3 in the queue" in line.text for line in at_once[0].logs(at_once[1]))
    for pid in users.lab.hosts[0].processes(containing="launch.py"):
        with suppress(OSError):  # one that has just ended
            if b"CLOUDTRAIN_ATTEMPT_ID=second-a1" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)  # guard and supervisor: the kernel frees what they held
    users.end("first")
    assert sees(third) == "0,1", "it was there before the fourth"
    users.end("third")
    assert sees(fourth) == "0"
    fourth[0].cancel(fourth[1])
    until(fourth, State.CANCELLED)


def test_a_gpu_that_others_fill_is_not_free_and_a_cancelled_wait_leaves_the_queue(users: Users) -> None:
    host = users.lab.hosts[0].name
    users.fill(f"GPU-0-{host}, 40000, 93\nGPU-1-{host}, 40000, 93\n")
    first, second = users.submit("ann", "a"), users.submit("bob", "b")
    until(first, State.QUEUED, "0 free; GPU 0: 40,000 MiB in use; GPU 1: 40,000 MiB in use")
    until(second, State.QUEUED, "number 2")
    first[0].cancel(first[1])
    until(first, State.CANCELLED)
    users.fill(f"GPU-0-{host}, 40000, 93\nGPU-1-{host}, 4, 0\n")
    assert sees(second) == "1"
    users.end("b")
    until(second, State.SUCCEEDED)


def test_a_job_over_two_hosts_has_its_gpus_on_both_or_does_not_start(users: Users) -> None:
    """Two jobs over the same hosts in another order, and one that holds a host: no job waits for another in a circle."""
    holds = users.submit("ann", "holds", hosts=(1,), gpus=2)
    sees(holds)
    two = users.submit("bob", "two", hosts=(1, 0), gpus=2)
    until(two, State.QUEUED, "in the queue for 2 of 2 GPUs")
    one = users.submit("ann", "one", hosts=(0, 1), gpus=2)  # by rank it would hold what `two` needs next
    until(one, State.QUEUED, "in the queue for 2 of 2 GPUs")
    for name in ("holds", "one", "two"):
        users.end(name)
    until(one, State.SUCCEEDED)
    until(two, State.SUCCEEDED)


def test_each_role_has_gpus_of_its_own_number(users: Users) -> None:
    """The judge asks for none: it waits for no GPU, and no node waits for it."""
    judge = {"run": "echo \"JUDGE '$CUDA_VISIBLE_DEVICES'\"; exec sleep 600", "resources": {"cpus": 1}}
    helper = {"run": "echo \"HELPER '$CUDA_VISIBLE_DEVICES'\"; exec sleep 600", "resources": {"accelerators": "A100"}}
    roles = {"trainer": {}, "judge": judge, "helper": helper}
    job = users.submit("ann", "roles", (0, 1, 2), gpus=2, roles=roles)
    assert sees(job) == "0,1"
    backend, handle = job
    wait_for(lambda: {"JUDGE ''", "HELPER '0'"} <= {line.text for line in backend.logs(handle)}, "the services")
    users.end("roles")
    until(job, State.SUCCEEDED)


def test_roles_on_one_host_take_its_gpus_together_and_the_next_attempt_waits_for_both(users: Users) -> None:
    server = {"run": "echo SEES $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER; exec sleep 600", "colocate": "trainer"}
    roles = {"trainer": {}, "server": {**server, "resources": {"accelerators": "A100:1"}}}
    first = users.submit("ann", "pair", roles=roles)
    until(first, State.RUNNING)
    backend, handle = first

    def seen() -> dict[int, str]:
        return {line.node: line.text.split()[1] for line in backend.logs(handle) if line.text.startswith("SEES")}

    wait_for(lambda: len(seen()) == 2, "the lines of both roles")
    assert seen() == {0: "0", 1: "1"}
    second = users.submit("bob", "later", roles=roles)
    until(second, State.QUEUED, "2 of 2 GPUs")
    users.end("pair")
    until(first, State.SUCCEEDED)
    until(second, State.RUNNING)
    users.end("later")
    until(second, State.SUCCEEDED)
