"""The quickstart on two pods, through the real command line: trained, and trained with one of them evicted on the way."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from tests.backends.kubernetes.clusters import Ground, ground
from tests.backends.ssh.test_training import QUICKSTART, SMALL
from tests.conftest import WAIT_S, wait_for

pytestmark = [pytest.mark.train, pytest.mark.timeout(1200)]
STEPS = 40


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, census) -> Iterator[Ground]:
    with ground(tmp_path / "ground") as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.store.url)
        folder = tmp_path / "configuration"
        folder.mkdir()
        lines = ["[targets.cluster]", 'backend = "kubernetes"', 'image = "any:1"', "poll_s = 0.2"]
        given = {"kubeconfig": str(made.cluster.kubeconfig), "server": made.cluster.url}
        lines += [f"{name} = {json.dumps(value)}" for name, value in given.items()]
        (folder / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
        monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(folder))
        yield made


def submitted() -> Run:
    changes = {**SMALL, "hyperparameters.max_steps": STEPS, "output": "gs://local/out"}
    sets = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "cloudtrain.cli", "submit", str(QUICKSTART), "-t", "cluster", *sets, "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=5 * WAIT_S)
    assert said.returncode == 0, said.stdout + said.stderr
    return Run.find(json.loads(said.stdout.splitlines()[-1])["run_id"])


def losses(run: Run) -> dict[int, float]:
    return {point.step: point.value for point in run.metrics("loss")}


def worlds(backend: KubernetesBackend, attempt) -> list[tuple[int, int]]:
    """What the launchers of an attempt say: (world size, node rank) of each node."""
    found = [events.parse(line.text) for line in backend.logs(attempt.handle) if line.rank == -1]
    return sorted(
        (e[1]["world_size"], e[1]["node_rank"]) for e in found if e and e[0] == "world" and "node_rank" in e[1]
    )


def evicted(place: Ground) -> Run:
    """Submit, evict the second pod behind the eighth step, and return the run at its end; again if it was faster than we."""
    objects, kubelet = place.cluster.objects, place.cluster.kubelet
    for _ in range(3):
        run = submitted()

        def pod(node: int, run: Run = run) -> dict | None:
            start = f"{run.run_id}-a1-{node}-"
            return next((p for p in objects.all("pods") if p["metadata"]["name"].startswith(start)), None)

        def step(pod=pod) -> int:
            found = pod(0)
            lines = (kubelet.log(found["metadata"]["uid"]) or []) if found else []
            return max((int(n) for _, text in lines[-50:] for n in re.findall(r'"step": ?(\d+)', text)), default=0)

        wait_for(lambda step=step: step() >= 8, "eight steps", 4 * WAIT_S)
        with objects.lock:
            if (victim := pod(1)) is not None:
                kubelet.disrupt(victim, "EvictionByEvictionAPI")
        assert run.wait(5 * WAIT_S).state is State.SUCCEEDED, list(run.logs())[-20:]
        if run.attempts[0].status.state is State.PREEMPTED:
            return run
    raise AssertionError("three runs ended before their pod was evicted")


@pytest.mark.long
def test_an_eviction_changes_no_loss(place: Ground):
    unbroken = submitted()
    assert unbroken.wait(5 * WAIT_S).state is State.SUCCEEDED, list(unbroken.logs())[-20:]
    wanted = losses(unbroken)
    assert sorted(wanted) == list(range(1, STEPS + 1))
    assert worlds(place.backend(), unbroken.attempts[0]) == [(2, 0), (2, 1)]
    image = f"docker.io/library/any@sha256:{hashlib.sha256(b'any:1').hexdigest()}"
    assert unbroken.attempts[0].images == {0: image, 1: image}, (
        "as the simulated kubelet tells of the image that it pulled"
    )

    broken = evicted(place)
    first, second = broken.attempts
    assert (first.status.state, second.status.state) == (State.PREEMPTED, State.SUCCEEDED)
    for attempt in (first, second):
        assert worlds(place.backend(), attempt) == [(2, 0), (2, 1)], "the log of an evicted pod is in the output"
    assert losses(broken) == wanted
