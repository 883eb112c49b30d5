"""Two processes train what one does: the same batches, losses, gradients and evaluations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.entrypoints.training import TINY, Trainer, texts, train

pytestmark = pytest.mark.train


def close(one: dict[int, float], other: dict[int, float], within: float = 1e-5) -> bool:
    assert one.keys() == other.keys() and one
    return all(abs(one[step] - other[step]) < within for step in one)


@pytest.mark.parametrize("samples", [45, 43])  # of 8 a batch: the last one has 5 left, then 3 (one rank has none)
def test_ddp_equals_one_process(tmp_path: Path, samples: int):
    """The same global batch, accumulation and clipping on; two epochs, the last batch of each incomplete."""
    data = [
        "--dataset",
        str(texts(tmp_path / "texts")),
        "--max_train_samples",
        str(samples),
        "--max_eval_samples",
        "13",
    ]
    common = [*TINY, *data, "--num_train_epochs", "2", "--max_grad_norm", "0.5", "--per_device_eval_batch_size", "3"]
    common += ["--eval_strategy", "epoch"]
    one = train(tmp_path / "one", [*common, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"])
    args = [*common, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    two = train(tmp_path / "two", args, 2, CLOUDTRAIN_PARALLELISM='{"strategy": "ddp"}')
    assert len(one.losses()) == 12 and one.events("metric")[-1]["step"] == 12
    assert max(one.norms().values()) > 0.5, "clipping must have had something to do"
    assert close(one.losses(), two.losses())
    assert close(one.norms(), two.norms())
    assert close(one.held_out(), two.held_out()) and len(one.held_out()) == 3  # before, between and after
    world, gradients = two.events("world")
    assert gradients["step"] == 1 and len(set(gradients["gradient_norms_per_rank"])) == 1
    assert (world["world_size"], world["wrapper"], world["strategy"]) == (2, "DistributedDataParallel", "ddp")
    assert world["parameters_per_rank"] == one.events("world")[0]["parameters_per_rank"] * 2
    assert two.events("world", rank=1) == [] and "step" not in two.output(1)


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_held_out_samples_count_once_whatever_the_world(tmp_path: Path, samples: int):
    """Fewer samples than ranks, and numbers that no world divides; samples of unequal length weigh by their tokens."""
    folder = texts(tmp_path / "texts")
    (tmp_path / "held.txt").write_text((folder / "text0.txt").read_text()[: 40 * samples - 11])
    args = [*TINY, "--dataset", str(folder), "--eval_dataset", str(tmp_path / "held.txt"), "--max_steps", "1"]
    args += ["--per_device_eval_batch_size", "2", "--max_eval_samples", str(samples)]
    found = [train(tmp_path / str(world), args, world).events("metric")[0] for world in (1, 2)]
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], abs=1e-6)
    for scores in found:
        assert scores["eval_perplexity"] == pytest.approx(math.exp(scores["eval_loss"])), (
            "of the mean, no mean of its own"
        )


def test_a_world_that_is_not_what_was_promised_is_refused(tmp_path: Path):
    """Two ranks that do not hear of each other: Accelerate on its own would train two models without a word."""
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "2"]
    env = {"CLOUDTRAIN_PARALLELISM": json.dumps({"strategy": "none"})}
    with Trainer(tmp_path / "run", args, 2, env) as refused:
        assert refused.codes() == [78, 78], refused.everything()
    assert "strategy none is for one process, the job has 2" in refused.output()
    with Trainer(tmp_path / "run", args, 2, {"ACCELERATE_USE_CPU": "false"}) as refused:
        assert refused.codes() == [78, 78], refused.everything()
    assert "the job has no GPU, but ACCELERATE_USE_CPU is off" in refused.output()
    assert refused.losses() == {}


def test_ranks_that_see_other_files_are_refused(tmp_path: Path):
    """Each rank looks into its own working directory here, as nodes look at their own disks."""
    args = [*TINY, "--dataset", "input:train", "--max_steps", "2"]
    texts(tmp_path / "0")
    texts(tmp_path / "1", words=299)
    with Trainer(tmp_path / "run", args, 2, {"CLOUDTRAIN_INPUT_TRAIN": tmp_path}, rank_input="TRAIN") as refused:
        assert refused.codes() == [78, 78], refused.everything()
    assert "the training data of rank 1 differs from rank 0's" in refused.output()
