"""A training that ends for a known cause: diverged, or its model could not be written. Exit 1, said, nothing published."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cloudtrain.diagnosis import patterns
from tests.entrypoints.training import ENTRYPOINTS, TINY, Trainer, texts

from trainer import publish  # isort: skip
from trainer.errors import Divergence, Ended  # isort: skip

assert ENTRYPOINTS


def reported(losses: list[float]) -> Divergence:
    divergence = Divergence()
    for step, loss in enumerate(losses, 1):
        divergence.update(step, loss)
    return divergence


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_the_third_report_in_a_row_without_a_finite_loss_ends_the_training(last: float):
    reported([1.0, math.nan, math.nan, 2.0, math.nan, math.nan, 1.5]).end()
    with pytest.raises(Ended) as caught:
        reported([1.0, math.nan, 2.0, math.nan, math.nan, last])
    assert str(caught.value).startswith(f"the loss is {last} in every report since step 4: the training has diverged")
    assert patterns.classify("log", f"train.py: {caught.value}") == "nan-loss"


def test_a_training_whose_last_report_is_nan_publishes_nothing():
    with pytest.raises(Ended, match="nan at step 2: .* No model is published"):
        reported([1.0, math.nan]).end()


def test_a_full_disk_leaves_no_part_of_a_model_and_is_said(tmp_path: Path):
    def write(error: Exception) -> None:
        with publish._published(tmp_path / "model", 1, lambda: None) as partial:
            (partial / "model.safetensors").write_text("a part")
            raise error

    for error in (OSError(28, "No space left on device"), ValueError("I/O error: No space left (os error 28)")):
        with pytest.raises(publish.Unwritten, match="the trained model could not be written to .*No space left"):
            write(error)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="something else"):
        write(ValueError("something else"))


@pytest.mark.train
@pytest.mark.parametrize("world", [1, 2])
def test_a_diverged_training_ends_soon_and_publishes_nothing(tmp_path: Path, world: int):
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "40", "--save_steps", "1"]
    with Trainer(tmp_path / "run", [*args, "--learning_rate", "1e38", "--max_grad_norm", "0"], world) as trainer:
        assert trainer.codes() == [1] * world, trainer.everything()
    losses = trainer.losses()
    assert [math.isfinite(loss) for loss in losses.values()][-4:] == [True, False, False, False], losses
    said = trainer.output()
    assert "train.py: the loss is nan in every report since step" in said and "Traceback" not in said
    assert not list((tmp_path / "run" / "model").iterdir())
    saved = [row["step"] for row in trainer.events("checkpoint")]
    assert saved and max(saved) <= max(losses) - 3, "no checkpoint has what is not finite"


@pytest.mark.train
def test_a_model_that_cannot_be_written_names_the_last_checkpoint(tmp_path: Path):
    folder = tmp_path / "run" / ("m" * 250)  # what is written beside it would have a longer name than a file can have
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "3"]
    with Trainer(tmp_path / "run", args, env={"CLOUDTRAIN_MODEL_DIR": folder}) as trainer:
        assert trainer.codes() == [1], trainer.everything()
    said = trainer.output()
    assert "train.py: the trained model could not be written to " in said and "Traceback" not in said
    assert f"the last complete checkpoint is that of step 3, {tmp_path}/run/checkpoints/step-00000003.a1" in said
    assert not list(folder.iterdir())
