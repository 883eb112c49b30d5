"""A training with `parallelism: auto` learns what the same job written by hand does (two ranks on a CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.forecast import layout
from cloudtrain.job.job import Job
from tests.entrypoints.training import TINY, texts, train

pytestmark = pytest.mark.train


def test_auto_and_by_hand_have_the_same_losses(tmp_path: Path):
    data = str(texts(tmp_path / "texts"))
    more = ["--dataset", data, "--max_steps", "4", "--global_batch_size", "8", "--eval_on_start", "false"]
    job = Job(name="t", trainer=True, source=str(tmp_path), parallelism="auto", args=[*TINY, *more],
              processes_per_node=2, resources={"memory": "16GB"})  # fmt: skip
    chosen, _ = layout.freeze(job)
    assert chosen.hyperparameters["per_device_train_batch_size"] == "4"
    auto = train(tmp_path / "auto", chosen.argv()[1:], world=2).losses()
    by_hand = train(tmp_path / "hand", [*TINY, *more, "--per_device_train_batch_size", "1"], world=2).losses()
    assert len(auto) == 4 and auto == pytest.approx(by_hand, rel=1e-5)
