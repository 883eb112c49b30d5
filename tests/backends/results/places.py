"""Targets of the matrix: how a job is submitted there, where its copies lie, and how its machine is lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import pytest

from cloudtrain.backends.sagemaker import docker as engine
from cloudtrain.runs.run import Run
from tests.backends.akash.ground import environment as akash_environment
from tests.backends.akash.ground import ground as akash_ground
from tests.backends.kubernetes.clusters import ground as cluster_ground
from tests.backends.sagemaker.test_backend import BUCKET
from tests.backends.sagemaker.test_backend import options as sagemaker_options
from tests.backends.ssh.test_backend import options as ssh_options
from tests.backends.vertex.test_local import end_simulator
from tests.conftest import WAIT_S
from tests.lab.connections import close_all


class Place(NamedTuple):
    """A backend's options and output; `copies` returns what survives the machine, `lose` takes the machine away."""

    backend: str
    options: dict[str, Any]
    output: str | None
    copies: Callable[[Run], list[str]]
    lose: Callable[[Run], None]


@contextmanager
def open_place(name: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Yield a target that is ready."""
    folder, home = request.getfixturevalue("tmp_path"), request.getfixturevalue("home")
    patch = request.getfixturevalue("monkeypatch")
    patch.setenv("CLOUDTRAIN_SYNC_EVERY_S", "0.2")
    below_home = _files_of(home / "runs")
    if name == "local":
        yield Place("local", {}, None, below_home, kill_launcher)
    elif name == "ssh":
        lab = request.getfixturevalue("lab")
        yield Place(
            "ssh", ssh_options(lab, 1), None, _files_of(lab.hosts[0].path("/root/.cloudtrain/runs")), kill_launcher
        )
        close_all()
    elif name == "slurm":
        slurm = request.getfixturevalue("slurm")
        options = {"folder": str(slurm.shared), "python": sys.executable, "partition": "main"}
        yield Place("slurm", options, None, _files_of(slurm.shared / "runs"), kill_launcher)
    elif name == "kubernetes":
        with cluster_ground(folder / "kubernetes") as made:
            patch.setenv("STORAGE_EMULATOR_HOST", made.store.url)
            options = {"kubeconfig": str(made.cluster.kubeconfig), "image": "any:1", "poll_s": 0.2}

            def evict(run: Run) -> None:
                with made.cluster.objects.lock:
                    (pod,) = made.cluster.objects.all("pods")
                    made.cluster.kubelet.disrupt(pod, "EvictionByEvictionAPI", grace_s=0)

            yield Place("kubernetes", options, "gs://local/out", _in_bucket(made.store.url), evict)
    elif name == "sagemaker":
        simulator = request.getfixturevalue("simulator")

        def listed(run: Run) -> list[str]:
            found = simulator.call("s3", "list_objects_v2", Bucket=BUCKET, Prefix=f"out/{run.run_id}/")
            return [item["Key"] for item in found.get("Contents", ())]

        def end(run: Run) -> None:
            simulator.jobs[run.attempts[-1].handle.rpartition("/")[2]]._hosts[0].end()

        simulator.behavior.environment["CLOUDTRAIN_SYNC_EVERY_S"] = "0.2"
        yield Place("sagemaker", sagemaker_options(simulator), f"s3://{BUCKET}/out", listed, end)
    elif name == "sagemaker-local":
        request.getfixturevalue("docker")

        def stop(run: Run) -> None:
            for container in engine.list_containers(Path(run.attempts[-1].handle)):
                engine.send_signal(container, "KILL")

        yield Place("sagemaker-local", {}, None, below_home, stop)
    elif name == "vertex-local":
        from cloudtrain.backends.vertex.local import VertexLocalBackend

        address = VertexLocalBackend({}, home / "runs")._address()

        def preempt(run: Run) -> None:
            number = run.attempts[-1].handle.rpartition("/")[2]
            with urlopen(Request(f"{address}/simulator/preempt/{number}?notice=no", method="POST"), timeout=WAIT_S):
                pass

        yield Place("vertex-local", {}, None, _in_bucket(address), preempt)
        end_simulator(home)
    else:
        akash_environment(patch)
        with akash_ground(folder / "akash") as made:

            def vanish(run: Run) -> None:
                (dseq,) = made.simulator.active()
                made.simulator.leases[dseq].kill()
                made.simulator.close_lease(dseq)

            yield Place("akash", made.options, None, lambda run: list(made.store.objects()), vanish)


def _files_of(folder: Path) -> Callable[[Run], list[str]]:
    """Return what lists a run's files below a folder, but for its attempts' own: a lost machine takes those along."""

    def listed(run: Run) -> list[str]:
        top = folder / run.run_id
        inner = [path.relative_to(top) for path in top.rglob("*") if path.is_file()]
        return [str(path) for path in inner if not path.parts[0].startswith("a")]

    return listed


def _in_bucket(address: str) -> Callable[[Run], list[str]]:
    import json

    def listed(run: Run) -> list[str]:
        with urlopen(f"{address}/storage/v1/b/local/o", timeout=WAIT_S) as answer:
            return [item["name"] for item in json.load(answer).get("items", ()) if run.run_id in item["name"]]

    return listed


def kill_launcher(run: Run) -> None:
    """Kill the launcher of a run and its ranks, without notice."""
    mark = f"CLOUDTRAIN_RUN_ID={run.run_id}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                pids += _with_launchers(int(entry.name))
        except OSError:
            continue
    for pid in sorted(set(pids)):  # the launcher's guard began first
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _with_launchers(pid: int) -> list[int]:
    """Return a process and those above it that are the launcher's."""
    above, found = pid, [pid]
    while True:
        fields = Path(f"/proc/{above}/stat").read_bytes().rpartition(b") ")[2].split()
        above = int(fields[1])
        if b"launch.py" not in Path(f"/proc/{above}/cmdline").read_bytes():
            return found
        found.append(above)
