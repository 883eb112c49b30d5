"""Roles with hardware of their own on a real Slurm: one heterogeneous job, a component for each role."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.events import State
from tests.backends.slurm.test_ends import PATIENT, Cluster, cluster, final, job_of, lines, said
from tests.conftest import WAIT_S, wait_for

__all__ = ["cluster"]
PORT = 18437
# Each role says what it has; the server serves until it is asked to end, the trainer asks it and ends with a code.
SCRIPT = f"""
import os, socket, sys, time
names = "CLOUDTRAIN_ROLE SLURM_CPUS_ON_NODE SLURMD_NODENAME"
print(*(os.environ.get(name, "-") for name in names.split()), flush=True)
if os.environ["CLOUDTRAIN_ROLE"] == "server":
    server = socket.create_server(("", {PORT}))
    while True:
        server.accept()[0].sendall(b"weights")
with socket.create_connection((os.environ["CLOUDTRAIN_ROLE_SERVER_HOST"], {PORT})) as connection:
    print("received", connection.makefile().read(7), flush=True)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
time.sleep(600)
"""
SERVER: dict[str, Any] = {"entrypoint": "script.py", "ready": f"tcp://:{PORT}",
                          "resources": {"accelerators": "any:1", "cpus": 1}}  # fmt: skip
JOB: dict[str, Any] = {"resources": {"accelerators": "any:2", "cpus": 3}, "processes_per_node": 1,
                       "roles": {"trainer": {"after": ["server"]}, "server": SERVER}}  # fmt: skip


@pytest.fixture
def gpus(cluster: Cluster) -> dict[str, Any]:
    """Options of nodes that list as many GPUs as their role has: the lab's Slurm counts files, and hides none."""
    folder = cluster.slurm.shared / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'GPU 0: X (UUID: GPU-a)'\n[ $SLURM_PROCID = 1 ] || echo 'GPU 1: X (UUID: GPU-b)'\n"
    )
    (folder / "nvidia-smi").chmod(0o755)
    return {"setup": [f"export PATH={folder}:$PATH"]}


def components(cluster: Cluster, handle: str) -> list[str]:
    return cluster.slurm.ask("squeue", "-h", "--states=all", "-j", job_of(handle), "-o", "%T").split()


def test_each_role_has_its_hardware_finds_the_other_and_the_main_one_ends_all(
    cluster: Cluster, gpus: dict[str, Any]
) -> None:
    backend, handle = cluster.submit(SCRIPT, 5, options=gpus, **JOB)
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 5), said(backend, handle)
    rows = {
        line.text.split()[0]: (line.node, *line.text.split()[1:]) for line in backend.logs(handle) if line.rank >= 0
    }
    trainer, server = rows["trainer"], rows["server"]
    assert rows["received"] == (0, "weights")
    assert trainer[:-1] == (0, "3") and server[:-1] == (1, "1")
    assert {trainer[-1], server[-1]} == {host.name for host in cluster.slurm.nodes}
    wait_for(lambda: set(components(cluster, handle)) <= {"COMPLETED", "FAILED"}, "the end of both components")
    shown = cluster.slurm.ask("scontrol", "-o", "show", "job", job_of(handle)).splitlines()
    assert [re.findall(r"NumCPUs=(\d)|TresPerNode=gres:gpu:(\d)", line) for line in shown] == [
        [("3", ""), ("", "2")],
        [("1", ""), ("", "1")],
    ]


def test_a_shell_on_each_component_and_a_cancel_that_ends_both(cluster: Cluster, gpus: dict[str, Any]) -> None:
    backend, handle = cluster.submit(SCRIPT, options=gpus, **JOB)
    wait_for(lines("received", backend, handle), "the trainer")
    [queued] = backend.statuses([handle]).values()
    assert queued.state is State.RUNNING and backend.status(handle).state is State.RUNNING
    for node in (0, 1):
        words = ("-c", "import os; print(os.environ['SLURMD_NODENAME'])")
        argv = backend.shell(handle, node, words, stdin=False, terminal=False).argv
        done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
        [own] = [
            line.text
            for line in backend.logs(handle)
            if line.node == node and line.text.startswith(("trainer", "server"))
        ]
        assert done.stdout.split() == own.split()[-1:], done.stderr
    backend.cancel(handle)
    assert final(backend, handle).state is State.CANCELLED
    wait_for(lambda: "RUNNING" not in components(cluster, handle), "the end of both components")


def test_scancel_of_the_first_component_ends_all(cluster: Cluster, gpus: dict[str, Any]) -> None:
    backend, handle = cluster.submit(SCRIPT, options=gpus, **JOB)
    wait_for(lines("received", backend, handle), "the trainer")
    cluster.slurm.ask("scancel", job_of(handle))
    assert final(backend, handle).state is State.CANCELLED
    wait_for(lambda: set(components(cluster, handle)) == {"CANCELLED"}, "the end of both components")


def test_all_components_wait_together(cluster: Cluster, gpus: dict[str, Any]) -> None:
    """One node is taken: no component begins on the other one."""
    taken = cluster.slurm.ask(
        "sbatch", "--parsable", "--exclusive", "-N1", "-o", "/dev/null", "--wrap", "sleep 600"
    ).strip()
    wait_for(lambda: cluster.slurm.ask("squeue", "-h", "-t", "RUNNING", "-j", taken), "the other job")
    backend, handle = cluster.submit(SCRIPT, 0, options=gpus, **JOB)
    wait_for(lambda: "Resources" in backend.status(handle).reason, "a look of the scheduler")
    assert backend.status(handle).state is State.QUEUED and set(components(cluster, handle)) == {"PENDING"}
    cluster.slurm.ask("scancel", taken)
    assert final(backend, handle).state is State.SUCCEEDED


def test_a_preempted_job_is_requeued_as_a_whole(cluster: Cluster, gpus: dict[str, Any]) -> None:
    keys = {**JOB, "resources": {**JOB["resources"], "use_spot": True}, "retry": {"max_attempts": 2}}
    roles = {"trainer": {}, "server": {"run": "sleep 600", "resources": {"cpus": 1}}}
    backend, handle = cluster.submit(PATIENT, 2, options={**gpus, "spot_partition": "low"}, **{**keys, "roles": roles})
    wait_for(lines("start 1", backend, handle), "the trainer")
    cluster.slurm.ask("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    status = final(backend, handle)
    assert status.state is State.SUCCEEDED, (status, said(backend, handle))
    assert lines("start 2", backend, handle)() == 1
    assert "Restarts=1" in cluster.slurm.ask("scontrol", "-o", "show", "job", job_of(handle))


def test_roles_that_share_nodes_divide_their_gpus_and_have_a_shell_each(cluster: Cluster, gpus: dict[str, Any]) -> None:
    """Two nodes with a trainer and a server each: the server has the GPU that the trainer left."""
    script = SCRIPT.replace("SLURM_CPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")
    (cluster.slurm.shared / "bin/nvidia-smi").write_text(
        "#!/bin/sh\necho 'GPU 0: X (UUID: GPU-a)'; echo 'GPU 1: X (UUID: GPU-b)'\n"
    )
    roles = {"trainer": {"num_nodes": 2, "after": ["server"]}, "server": {**SERVER, "colocate": "trainer"}}
    job = {**JOB, "resources": {"accelerators": "any:1", "cpus": 2}, "roles": roles}
    backend, handle = cluster.submit(script, options=gpus, **job)
    wait_for(lambda: lines("received", backend, handle)() == 2, "both trainers")
    rows = {
        line.node: line.text.split() for line in backend.logs(handle) if line.text.startswith(("trainer", "server"))
    }
    hosts = [host.name for host in cluster.slurm.nodes][:2]
    assert rows == {
        0: ["trainer", "0", hosts[0]],
        1: ["trainer", "0", hosts[1]],
        2: ["server", "1", hosts[0]],
        3: ["server", "1", hosts[1]],
    }
    words = ("-c", "import os; print(os.environ['SLURMD_NODENAME'])")
    argv = backend.shell(handle, 3, words, stdin=False, terminal=False).argv
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.split() == hosts[1:], done.stderr
    backend.cancel(handle)
    assert final(backend, handle).state is State.CANCELLED


def test_a_dry_run_of_slurm_takes_the_arguments(cluster: Cluster, gpus: dict[str, Any]) -> None:
    backend, plan, _ = cluster.plan(SCRIPT, options=gpus, **JOB)
    assert isinstance(backend, SlurmBackend) and not list(backend.probe(plan)), json.dumps(plan.request["sbatch"])
    assert not Path(str(plan.request["folder"])).exists()


pytestmark = pytest.mark.usefixtures("census")
