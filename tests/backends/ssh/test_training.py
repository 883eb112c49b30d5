"""The quickstart over two machines, through the real command line: trained, and trained with one of them lost on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.backends.ssh.test_backend import left_on, options
from tests.conftest import WAIT_S, wait_for
from tests.lab.connections import close_all

pytestmark = [pytest.mark.train, pytest.mark.timeout(1200)]
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "job.yaml"
SMALL = {
    "num_nodes": 2,
    "processes_per_node": 1,
    "retry.max_attempts": 3,
    "checkpoint.every": "5 steps",
    "env.OMP_NUM_THREADS": '"1"',
    "hyperparameters.max_train_bytes": 60000,
    "hyperparameters.max_eval_samples": 4,
    "hyperparameters.tokenizer": "bpe:300",
    "hyperparameters.hidden_size": 32,
    "hyperparameters.num_hidden_layers": 2,
    "hyperparameters.num_attention_heads": 2,
    "hyperparameters.block_size": 32,
    "hyperparameters.per_device_train_batch_size": 2,
    "hyperparameters.max_steps": 40,
    "hyperparameters.logging_steps": 1,
    "hyperparameters.sample_tokens": 0,
}


@pytest.fixture
def submit(lab, tmp_path, monkeypatch, census, request):
    """Return a function that submits the quickstart to the target `machines` and returns its run."""
    folder = tmp_path / "configuration"
    folder.mkdir()
    given = options(lab, getattr(request, "param", 2))
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items() if name != "hosts"]
    hosts = ", ".join(f'{{address = "{host["address"]}"}}' for host in given["hosts"])
    (folder / "cloudtrain.toml").write_text(
        "\n".join(["[targets.machines]", 'backend = "ssh"', *lines, f"hosts = [{hosts}]"]) + "\n"
    )
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(folder))
    for host in lab.hosts:
        host.run(["rm", "-rf", "/root/.cloudtrain"])

    def submit(*more: str) -> Run:
        sets = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "cloudtrain.cli", "submit", str(QUICKSTART), "-t", "machines", *sets, *more]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=5 * WAIT_S)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        return Run.find()

    yield submit
    close_all()


def losses(run: Run) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in Store(Path(os.environ["CLOUDTRAIN_HOME"])).metrics(run.run_id, "loss"):
        found.setdefault(row.step, []).append(row.value)
    return found


@pytest.mark.long
def test_one_machine_is_lost_on_the_way(lab, submit, tmp_path):
    whole = submit("--wait", "--key", "whole")
    events = [event.data for event in whole.store.events(whole.run_id) if event.kind == "world"]
    worlds = [world for world in events if "hostname" in world]  # the launchers'; the trainer tells of its own
    assert sorted((world["hostname"], world["node_rank"], world["world_size"]) for world in worlds) == [
        (lab.hosts[0].name, 0, 2),
        (lab.hosts[1].name, 1, 2),
    ]
    reference = losses(whole)
    assert list(reference) == list(range(1, 41)) and all(len(values) == 1 for values in reference.values())
    fetched = whole.fetch(tmp_path / "fetched")  # from node 0
    assert (fetched / "model" / "model.safetensors").stat().st_size > 0
    assert any((fetched / "checkpoints").glob("step-*/COMPLETE"))

    broken = submit("--key", "broken")
    wait_for(lambda: any(step >= 13 for step in losses(broken)), "step 13", 5 * WAIT_S)
    lab.hosts[1].cut()
    wait_for(lambda: left_on(lab) == [], "the end on both hosts", 5 * WAIT_S)
    lab.hosts[1].heal()
    assert broken.wait(5 * WAIT_S).state is State.SUCCEEDED
    assert [attempt.status.state for attempt in broken.attempts] == [State.LOST, State.SUCCEEDED]
    seen = losses(broken)
    assert {step: set(values) for step, values in seen.items()} == {s: set(v) for s, v in reference.items()}
    again = [line.text for line in broken.logs() if "resumed from" in line.text]
    assert len(again) == 1 and ".a1" in again[0]
    wait_for(lambda: left_on(lab) == [], "the end of everything")


@pytest.mark.long
@pytest.mark.parametrize("submit", [3], indirect=True, ids=["three machines"])
def test_one_of_three_is_lost_and_two_go_on_from_the_checkpoint(lab, submit):
    """Dropout off and the same global batch: the losses are those of three, within 1e-5."""
    sets = ["num_nodes=3", "min_nodes=2", "hyperparameters.global_batch_size=12", "hyperparameters.dropout=0"]
    words = [word for pair in sets for word in ("--set", pair)]
    whole = submit(*words, "--wait", "--key", "whole")
    reference = {step: values[0] for step, values in losses(whole).items()}
    assert sorted(reference) == list(range(1, 41))

    broken = submit(*words, "--key", "broken")
    wait_for(lambda: any(step >= 13 for step in losses(broken)), "step 13", 5 * WAIT_S)
    lab.hosts[2].power_off()
    assert broken.wait(5 * WAIT_S).state is State.SUCCEEDED
    first, second = broken.attempts
    assert (first.status.state, second.status.state) == (State.LOST, State.SUCCEEDED)
    worlds = [event for event in broken.store.events(broken.run_id, "world") if "hostname" in event.data]
    assert {(event.attempt, event.data["world_size"]) for event in worlds} == {
        (first.attempt_id, 3),
        (second.attempt_id, 2),
    }
    seen = losses(broken)
    assert sorted(seen) == sorted(reference)
    assert max(abs(value - reference[step]) for step, values in seen.items() for value in values) < 1e-5
    again = [line.text for line in broken.logs() if "resumed from" in line.text]
    assert len(again) == 1 and ".a1" in again[0]
