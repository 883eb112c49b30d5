"""Law 7: killed at any step and started again, the trainer goes on to the bit, dropout on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.entrypoints.training import TINY, Trainer, texts, train

pytestmark = pytest.mark.train

STEPS = 40  # with 9 global batches an epoch: several epochs, each with its own shuffle


def arguments(folder: Path, *more: str) -> list[str]:
    data = ["--dataset", str(texts(folder)), "--max_train_samples", "35", "--max_eval_samples", "5"]
    words = [*TINY, *data, "--dropout", "0.2", "--max_steps", str(STEPS), "--lr_scheduler_type", "cosine", *more]
    return [*words, "--eval_strategy", "steps", "--eval_steps", "4"]


CASES = {
    "one process": (1, ["--per_device_train_batch_size", "4"]),
    "one process, workers, accumulation": (
        1,
        ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--dataloader_num_workers", "2"],
    ),
    "ddp, accumulation": (2, ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]),
    "ddp, workers": (2, ["--per_device_train_batch_size", "2", "--dataloader_num_workers", "2"]),
}


@pytest.mark.parametrize(
    "case", [case if "workers" in case else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_killed_and_started_again_is_exact(tmp_path: Path, case: str, figure: Callable):
    world, more = CASES[case]
    args = arguments(tmp_path / "texts", *more)
    unbroken = train(tmp_path / "unbroken", args, world)
    assert sorted(unbroken.losses()) == list(range(1, STEPS + 1))

    with Trainer(tmp_path / "broken", args, world, {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "4"}) as broken:
        broken.wait_for_step(11)
        broken.kill()
    for saved in (tmp_path / "broken" / "checkpoints").glob(f"step-{STEPS:08d}.*/COMPLETE"):
        saved.unlink()  # on a busy machine the kill may come late: then it came while the last one was being written
    resumed = train(tmp_path / "broken", args, world, attempt=2, CLOUDTRAIN_CHECKPOINT_EVERY_STEPS="4")

    assert "resumed from" in resumed.output()
    again = resumed.losses()
    told = [event["step"] for event in broken.events("checkpoint")]  # the one of step 8 may have been under way
    assert (min(again) - 1) % 4 == 0 and min(again) > max(told) >= 4, "it began elsewhere"
    assert again == {step: loss for step, loss in unbroken.losses().items() if step in again}
    assert broken.losses() == {step: loss for step, loss in unbroken.losses().items() if step in broken.losses()}
    assert resumed.norms() == {step: norm for step, norm in unbroken.norms().items() if step in again}
    assert resumed.held_out()[STEPS] == unbroken.held_out()[STEPS]
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("unbroken", "broken"))
    assert all((one[name] == other[name]).all() for name in one | other)
    start = f"held-out loss {unbroken.held_out()[0]:.3f} -> "
    assert start in unbroken.output() and start in resumed.output()
    figure("resume", {"written": f"{case} (killed)"})


def test_three_ranks_sum_in_the_same_order_again(tmp_path: Path):
    """Of three numbers the sum depends on the order, and that on DDP's buckets, which the first step rearranges."""
    sizes = ["--hidden_size", "192", "--num_hidden_layers", "5", "--max_steps", "8", "--eval_strategy", "no"]
    args = [*arguments(tmp_path / "texts", "--per_device_train_batch_size", "2"), *sizes]
    run = tmp_path / "run"
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "3", "CLOUDTRAIN_CHECKPOINT_KEEP": "9"}
    unbroken = train(run, args, 3, **env)
    for step in (6, 8):
        (run / "checkpoints" / f"step-{step:08d}.a1" / "COMPLETE").unlink()
    resumed = train(run, args, 3, attempt=2, **env)
    assert resumed.losses() == {step: loss for step, loss in unbroken.losses().items() if step > 3}
    assert len(resumed.losses()) == 5


def test_the_sums_between_two_lines_survive(tmp_path: Path):
    """A checkpoint between two lines of progress: the next line's mean covers the steps of both attempts."""
    args = [*arguments(tmp_path / "texts", "--per_device_train_batch_size", "2"), "--logging_steps", "5"]
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "19", "CLOUDTRAIN_CHECKPOINT_KEEP": "9"}
    unbroken = train(tmp_path / "run", args, 2, **env)
    for step in (38, STEPS):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}.a1" / "COMPLETE").unlink()
    resumed = train(tmp_path / "run", args, 2, attempt=2)
    assert resumed.losses() == {step: loss for step, loss in unbroken.losses().items() if step >= 20}
    assert sorted(resumed.losses()) == [20, 25, 30, 35, 40]


@pytest.mark.parametrize("world", [1, 2])
def test_asked_to_leave_it_saves_and_goes_on_exactly(tmp_path: Path, world: int):
    args = arguments(tmp_path / "texts", "--per_device_train_batch_size", str(4 // world))
    args += ["--max_steps", "400"]
    with Trainer(tmp_path / "run", args, world) as stopped:
        stopped.wait_for_step(3)
        stopped.terminate(world - 1)  # one rank alone is told; all agree on a step
        assert stopped.codes() == [75] * world, stopped.output()
    saved = stopped.events("checkpoint")[-1]["step"]
    assert saved == max(stopped.losses())
    assert f"stop requested: saved at step {saved}/400" in stopped.output()

    with Trainer(tmp_path / "run", args, world, attempt=2) as resumed:
        resumed.wait_for_step(saved + 3)
        resumed.kill()
    with Trainer(tmp_path / "unbroken", args, world) as unbroken:
        unbroken.wait_for_step(saved + 3)
        unbroken.kill()
    again = {step: loss for step, loss in resumed.losses().items() if step <= saved + 3}
    assert min(again) == saved + 1
    assert again == {step: loss for step, loss in unbroken.losses().items() if step in again}


def test_a_finished_run_started_again_ends_at_once_with_the_same_model(tmp_path: Path):
    args = arguments(tmp_path / "texts")
    first = train(tmp_path / "run", args)
    model = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    second = train(tmp_path / "run", args, attempt=2)
    assert second.losses() == {}
    assert second.held_out() == {STEPS: first.held_out()[STEPS]}
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == model
    assert second.output().splitlines()[-2:] == first.output().splitlines()[-2:]


def test_a_torn_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path):
    """On both ranks alike, though only rank 0 reads; and the losses are still those of the unbroken run."""
    args = arguments(tmp_path / "texts", "--per_device_train_batch_size", "2")
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "3", "CLOUDTRAIN_CHECKPOINT_KEEP": "4"}
    unbroken = train(tmp_path / "run", args, 2, **env)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{step:08d}.a1" for step in (33, 36, 39, 40)]
    (folder / "step-00000040.a1" / "COMPLETE").unlink()
    part = folder / "step-00000039.a1" / "rank-00001.pt"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    resumed = train(tmp_path / "run", args, 2, attempt=2)
    assert "checkpoint step-00000040.a1 is skipped: it is incomplete" in resumed.output()
    assert "step-00000039.a1 is skipped: rank-00001.pt differs from what was written" in resumed.output()
    assert f"resumed from {folder}/step-00000036.a1" in resumed.output()
    assert resumed.losses() == {step: loss for step, loss in unbroken.losses().items() if step > 36}
