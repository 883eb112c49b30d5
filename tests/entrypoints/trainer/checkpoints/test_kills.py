"""Spot machines vanish when they like: killed again and again at random moments, a run loses little and comes to the same."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.entrypoints.training import TINY, WAIT_S, Trainer, texts, train
from tests.seed import first_seed

pytestmark = [pytest.mark.train, pytest.mark.timeout(7200)]

EVERY = 5  # steps between checkpoints
ENV = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": EVERY, "CLOUDTRAIN_CHECKPOINT_KEEP": 2}


def killed(run: Path, args: list[str], world: int, attempt: int, draw: random.Random) -> Trainer:
    """Kill an attempt at a random moment; some come far enough to leave a newer checkpoint, some do not."""
    steps, more_s = draw.randint(0, 3 * EVERY), draw.uniform(0, 0.1)
    with Trainer(run, args, world, ENV, attempt) as trainer:
        deadline = time.monotonic() + WAIT_S
        while len(trainer.losses()) < steps and trainer.processes[0].poll() is None:
            assert time.monotonic() < deadline, trainer.everything()
            time.sleep(0.01)
        time.sleep(more_s)
        trainer.kill()
    return trainer


@pytest.mark.parametrize(
    "kills, world, steps",
    [(3, 1, 90), pytest.param(100, 1, 500, marks=pytest.mark.long)],
    ids=["a few", "a hundred"],
)
def test_killed_at_random_times_it_loses_little_and_ends_the_same(tmp_path: Path, kills: int, world: int, steps: int):
    """Work lost at a kill: two intervals of steps at most. Of the last two checkpoints one is complete, since a save waits
    for the one before. The times are those of a seed that is printed; dropout is on."""
    draw = random.Random(first_seed())
    data = ["--dataset", str(texts(tmp_path / "texts")), "--max_train_samples", "35", "--max_eval_samples", "5"]
    args = [*TINY, *data, "--dropout", "0.2", "--max_steps", str(steps), "--per_device_train_batch_size", "2"]
    unbroken = train(tmp_path / "unbroken", args, world)
    reference = unbroken.losses()
    assert sorted(reference) == list(range(1, steps + 1))

    run = tmp_path / "run"
    done, lost = 0, []
    for attempt in range(1, kills + 1):
        losses = killed(run, args, world, attempt, draw).losses()
        assert losses == {step: reference[step] for step in losses}
        if losses:
            lost.append(done - min(losses) + 1)
        done = max(done, *losses, 0)
    last = train(run, args, world, attempt=kills + 1, CLOUDTRAIN_CHECKPOINT_EVERY_STEPS="50")
    losses = last.losses()  # none where the machine held this test up for so long that an attempt came to the end
    lost.append(done - min(losses, default=steps + 1) + 1)
    assert losses == {step: reference[step] for step in range(steps + 1 - len(losses), steps + 1)}
    print("steps lost at each kill", lost)
    assert max(lost) <= 2 * EVERY, lost
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("unbroken", "run"))
    assert all((one[name] == other[name]).all() for name in one | other)
