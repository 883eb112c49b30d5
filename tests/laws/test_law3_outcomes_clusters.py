"""Law 3, submissions: drawn sequences of lost answers on Kubernetes, Slurm and SSH; what refuses, and what is not known.

Kubernetes is the simulator with its faults. Slurm and sshd are real: Slurm's commands are wrapped, so that they lose an
answer before or after the real command ran, and questions over SSH are lost with their connection.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain import remote, rpc, supervision
from cloudtrain.kubeapi import TRIES
from cloudtrain.simulators.server import Fault
from tests.backends.clusters import Ground, ground
from tests.backends.test_ssh import options
from tests.conftest import wait_for
from tests.lab.network import Lab
from tests.lab.slurm import Slurm
from tests.laws.outcomes import drive, recorded

KUBERNETES, SLURM, SSH = 20, 10, 10  # sequences of a normal run: 40
LONG = {"kubernetes": range(100, 200), "slurm": range(100, 150), "ssh": range(100, 150)}  # 200


# -- Kubernetes -------------------------------------------------------------------------------------------------------


class Kubernetes:
    """The simulated cluster; its answers are lost five times in a row, which is when the client gives up."""

    backend = "kubernetes"

    def __init__(self, place: Ground) -> None:
        self.cluster = place.cluster
        self.options = {"kubeconfig": str(place.cluster.kubeconfig), "image": "any:1", "poll_s": 0.05}
        self.before = set(self.jobs())

    def lose(self, choose: random.Random) -> None:
        method, path = choose.choice([("POST", "/jobs$"), ("POST", "configmaps"), ("PATCH", "/jobs/")])
        self._fault(method, path, choose)

    def fail(self, choose: random.Random) -> None:
        calls = [("GET", "/jobs/"), ("GET", "/pods$"), ("GET", "/log"), ("GET", "/events")]
        calls += [("POST", "/jobs$"), ("POST", "configmaps"), ("PATCH", "/jobs/")]
        self._fault(*choose.choice(calls), choose)

    def _fault(self, method: str, path: str, choose: random.Random) -> None:
        status, times = choose.choice([0, 500, 503, 504, 429]), choose.choice([1, TRIES, TRIES, 2 * TRIES])
        after = status != 429 and choose.random() < 0.6
        self.cluster.faults.append(Fault(method, path, status, times=times, after=after, skip=choose.randint(0, 1)))

    def heal(self) -> None:
        self.cluster.faults.clear()

    def jobs(self) -> list[str]:
        names = [job["metadata"]["name"] for job in self.cluster.objects.all("jobs")]
        return [name for name in names if name not in getattr(self, "before", ())]

    def live(self) -> list[str]:
        return [job["metadata"]["name"] for job in self.cluster.objects.all("jobs") if self._lives(job)]

    def _lives(self, job: dict) -> bool:
        over = {c["type"] for c in job["status"].get("conditions") or () if c["status"] == "True"}
        return not job["spec"].get("suspend") and not over & {"Complete", "Failed"}

    def check(self) -> None:
        pass


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("kubernetes")) as made:
        yield made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.kubeapi.PAUSE_S", 0.0005)
    monkeypatch.setattr("cloudtrain.remote.PAUSE_S", 0.0)


def over_kubernetes(place: Ground, folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    with recorded("kubernetes", monkeypatch):
        for seed in seeds:
            platform = Kubernetes(place)
            done += drive(platform, folder / str(seed), seed)
    return done


@pytest.mark.usefixtures("quick")
def test_kubernetes_loses_answers(cluster, tmp_path, monkeypatch, figure):
    done = over_kubernetes(cluster, tmp_path, range(KUBERNETES), monkeypatch)
    figure("drawn sequences of lost answers, kubernetes", KUBERNETES)
    assert done["submit"] >= KUBERNETES


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("quick")
def test_kubernetes_loses_answers_for_long(cluster, tmp_path, monkeypatch, figure):
    over_kubernetes(cluster, tmp_path, LONG["kubernetes"], monkeypatch)
    figure("drawn sequences of lost answers, kubernetes", len(LONG["kubernetes"]))


# -- Slurm ------------------------------------------------------------------------------------------------------------

WRAPPER = """#!/bin/bash
fault={faults}/{name}
for when in before after; do
  if [ -s "$fault.$when" ]; then
    left=$(($(cat "$fault.$when") - 1))
    if [ $left -gt 0 ]; then echo $left >"$fault.$when"; else rm "$fault.$when"; fi
    [ $when = after ] && {real} "$@" >/dev/null 2>&1
    echo "{name}: error: {said}" >&2
    exit 1
  fi
done
exec {real} "$@"
"""


class Cluster:
    """A real Slurm, behind commands that lose answers. Jobs wait in a queue that is closed, unless they are to run."""

    backend = "slurm"

    def __init__(self, slurm: Slurm, folder: Path, *, runs: bool) -> None:
        self.slurm, self.faults = slurm, folder / "faults"
        self.faults.mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.options = {"folder": str(slurm.shared), "python": sys.executable}
        for name in ("sbatch", "squeue", "scontrol", "scancel"):
            text = WRAPPER.format(
                faults=self.faults, name=name, real=f"/usr/bin/{name}", said="Socket timed out on send/recv operation"
            )
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        slurm.ask("scontrol", "update", "PartitionName=main", f"State={'UP' if runs else 'DOWN'}")
        self.before = set(self._rows())

    def lose(self, choose: random.Random) -> None:
        self._fault("sbatch", choose)

    def fail(self, choose: random.Random) -> None:
        for name in choose.choice(
            [["sbatch"], ["squeue"], ["scancel"], ["squeue", "scontrol"], ["squeue", "scontrol"]]
        ):
            self._fault(name, choose)

    def _fault(self, name: str, choose: random.Random) -> None:
        (self.faults / f"{name}.{choose.choice(['before', 'after'])}").write_text(str(choose.randint(1, 2)))

    def heal(self) -> None:
        for path in self.faults.iterdir():
            path.unlink()

    def _rows(self, *states: str) -> dict[str, str]:
        argv = ["/usr/bin/squeue", "--noheader", f"--states={','.join(states) or 'all'}", "--format=%i %j"]
        return dict(line.split(None, 1) for line in self.slurm.ask(*argv).splitlines())

    def jobs(self) -> list[str]:
        return [name.strip() for number, name in self._rows().items() if number not in self.before]

    def live(self) -> list[str]:
        return [name.strip() for name in self._rows("PENDING", "RUNNING", "CONFIGURING", "COMPLETING").values()]

    def check(self) -> None:
        pass


def over_slurm(slurm: Slurm, folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    path = os.environ["PATH"]
    try:
        for seed in seeds:
            platform = Cluster(slurm, folder / f"{seed}-shims", runs=seed % 5 == 0)
            with monkeypatch.context() as patch, recorded("slurm", patch):
                patch.setenv("PATH", f"{platform.bin}:{path}")
                patch.setattr("cloudtrain.backends.slurm.LATE_S", (0.05, 0.1))
                patch.setattr("cloudtrain.backends.slurm.SlurmBackend.poll_s", 0.1)
                done += drive(platform, folder / str(seed), seed)
    finally:
        slurm.ask("scontrol", "update", "PartitionName=main", "State=UP")
    return done


def test_slurm_loses_answers(slurm, tmp_path, monkeypatch, figure):
    done = over_slurm(slurm, tmp_path, range(SLURM), monkeypatch)
    figure("drawn sequences of lost answers, slurm", SLURM)
    assert done["submit"] >= SLURM


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_slurm_loses_answers_for_long(slurm, tmp_path, monkeypatch, figure):
    over_slurm(slurm, tmp_path, LONG["slurm"], monkeypatch)
    figure("drawn sequences of lost answers, slurm", len(LONG["slurm"]))


# -- SSH --------------------------------------------------------------------------------------------------------------


class Machines:
    """Real machines whose connections break: before a question arrives, or behind it, when its answer is on its way."""

    backend = "ssh"

    def __init__(self, lab: Lab, hosts: int, patch: pytest.MonkeyPatch) -> None:
        self.lab, self.options = lab, options(lab, hosts)
        self.faults: list[tuple[str, bool, int]] = []  # operation ("" is any), whether it is done, how many pass before
        ask = rpc.There._ask

        async def asked(there: rpc.There, data: bytes) -> rpc.Answer:
            fault = self._fault(json.loads(data.partition(b"\n")[0])["operation"])
            if fault is None:
                return await ask(there, data)
            connection = await there.remote.connection()
            if fault:
                await ask(there, data)
            connection.abort()
            raise ConnectionResetError("the connection broke")

        patch.setattr(rpc.There, "_ask", asked)

    def _fault(self, operation: str) -> bool | None:
        for number, (name, after, skip) in enumerate(self.faults):
            if name in ("", operation):
                if skip:
                    self.faults[number] = (name, after, skip - 1)
                else:
                    del self.faults[number]
                    return after
                return None
        return None

    def lose(self, choose: random.Random) -> None:
        self.faults.append((choose.choice(["launch", "launch", "write", "extract"]), choose.random() < 0.6, 0))

    def fail(self, choose: random.Random) -> None:
        operation = choose.choice(["", "", "request", "begun", "prepare", "launch", "cancel", "report"])
        self.faults.append((operation, choose.random() < 0.6, choose.randint(0, 2)))

    def heal(self) -> None:
        self.faults.clear()

    def _firsts(self) -> list[Path]:
        """Return the folder of node 0 of every attempt, on whichever machines one was started."""
        found = [host.path("/root/.cloudtrain/runs").glob("*/a*/node-0/started") for host in self.lab.hosts]
        return [path.parent for paths in found for path in paths]

    def jobs(self) -> list[str]:
        return [_attempt_of(node) for node in self._firsts()]

    def live(self) -> list[str]:
        final = supervision.FINAL
        return [_attempt_of(n) for n in self._firsts() if (supervision.read_status(n) or {}).get("state") not in final]

    def check(self) -> None:
        for host in self.lab.hosts:
            wait_for(lambda host=host: not host.processes(containing="launch.py"), "the end of all processes")


def _attempt_of(node: Path) -> str:
    return f"{node.parts[-3]}-{node.parts[-2]}"


def over_ssh(lab: Lab, folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    done: Counter[str] = Counter()
    for seed in seeds:
        with monkeypatch.context() as patch, recorded("ssh", patch):
            nodes = 1 + seed % 2
            platform = Machines(lab, 2 + seed // 2 % 2, patch)
            done += drive(platform, folder / str(seed), seed, num_nodes=nodes)
        remote.close_all()
        for host in lab.hosts:
            wait_for(lambda host=host: not host.processes(), "the end of the agents")
            host.clear()
    return done


@pytest.mark.usefixtures("quick")
def test_ssh_loses_answers(lab, tmp_path, monkeypatch, figure):
    done = over_ssh(lab, tmp_path, range(SSH), monkeypatch)
    figure("drawn sequences of lost answers, ssh", SSH)
    assert done["submit"] >= SSH


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("quick")
def test_ssh_loses_answers_for_long(lab, tmp_path, monkeypatch, figure):
    over_ssh(lab, tmp_path, LONG["ssh"], monkeypatch)
    figure("drawn sequences of lost answers, ssh", len(LONG["ssh"]))
