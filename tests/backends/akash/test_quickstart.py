"""The quickstart on two simulated services, by the command line: trained, and trained with its provider lost on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.runs.run import Run
from tests.backends.akash.ground import CHEAP, SOLID, Ground, environment, ground
from tests.backends.ssh.test_training import QUICKSTART, SMALL
from tests.conftest import WAIT_S, wait_for

pytestmark = [pytest.mark.train, pytest.mark.timeout(1200)]
STEPS = 40


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, census: Path) -> Iterator[Ground]:
    environment(monkeypatch)
    with ground(tmp_path / "ground") as made:
        folder = tmp_path / "configuration"
        folder.mkdir()
        lines = ["[targets.market]", 'backend = "akash"', 'lost_after = "5s"']
        lines += [f"{name} = {json.dumps(value)}" for name, value in made.options.items()]
        (folder / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
        monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(folder))
        yield made


def cloudtrain(*words: str) -> str:
    command = [sys.executable, "-m", "cloudtrain.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submitted(target: str, *more: str) -> Run:
    changes = {**SMALL, "hyperparameters.max_steps": STEPS, "retry.max_attempts": 3}
    sets = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    said = cloudtrain("submit", str(QUICKSTART), "-t", target, *sets, *more, "--new", "--json")
    return Run.find(json.loads(said.splitlines()[-1])["run_id"])


def losses(run: Run) -> dict[int, float]:
    return {point.step: point.value for point in run.metrics("loss")}


def lost(place: Ground) -> Run:
    """Submit, take the provider away behind the twelfth step, and return the run at its end; again if it was faster."""
    for _ in range(3):
        run = submitted("market")
        wait_for(lambda run=run: max(losses(run), default=0) >= 12, "twelve steps", 4 * WAIT_S)
        place.simulator.vanish(CHEAP)
        assert run.wait(5 * WAIT_S).state is State.SUCCEEDED, list(run.logs())[-20:]
        place.simulator.providers[0].gone = False
        if len(run.attempts) == 2:
            return run
    raise AssertionError("three runs ended before their provider was lost")


@pytest.mark.long
def test_a_lost_provider_changes_no_loss(place: Ground, tmp_path: Path) -> None:
    unbroken = submitted("local")
    assert unbroken.wait(5 * WAIT_S).state is State.SUCCEEDED, list(unbroken.logs())[-20:]
    wanted = losses(unbroken)
    assert sorted(wanted) == list(range(1, STEPS + 1))

    run = lost(place)
    first, second = run.attempts
    assert (first.status.state, second.status.state) == (State.LOST, State.SUCCEEDED)
    assert "cheap.example does not answer" in first.status.reason
    providers = [each["leases"][-1]["id"]["provider"] for each in place.simulator.deployments.values()]
    assert providers[-2:] == [CHEAP, SOLID] and place.posts() == len(providers)
    assert losses(run) == wanted, "one file learns the same in both places, a loss or not"
    assert place.simulator.active() == [], "the watcher has closed every lease"
    cloudtrain("fetch", run.run_id, "-o", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_size > 10_000

    stopped = submitted("market")
    wait_for(lambda: next(stopped.logs(raw=True), None), "its first line")
    cloudtrain("cancel", stopped.run_id)
    assert stopped.wait(5 * WAIT_S).state is State.CANCELLED and place.simulator.active() == []
