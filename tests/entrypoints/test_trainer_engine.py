"""checkpoint.engine: each Trainer of a process gets its checkpoints from us, whoever imports it and whatever class it is of."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cloudtrain.backends.manifest import Manifest
from cloudtrain.job.job import Job
from tests.entrypoints.training import ENTRYPOINTS

MODULE = """
import os
class Trainer:
    def __init__(self):
        self.trained = []
    def train(self, *args, **kwargs):
        'What the Trainer does.'
        self.trained.append((args, kwargs))
        return "trained"
class Own(Trainer):
    def train(self, steps):
        return "own " + super().train(steps, trial=None)
"""


class Recorder:
    """Stands for TrainerCheckpoints, which changes `train` of its trainer as this does."""

    def __init__(self, trainer: object) -> None:
        self.trainer, self.asked = trainer, []
        self._trainers = {"train": trainer.train}
        trainer.train, trainer.engine = self._train, self

    def _train(self, *args: object, **kwargs: object) -> str:
        self.asked.append((args, kwargs))
        return f"ours {self._trainers['train'](*args, **kwargs)}"


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A package with a Trainer in it that was imported after our importer was there."""
    monkeypatch.syspath_prepend(str(ENTRYPOINTS / "path"))
    ours = importlib.import_module("cloudtrain_trainer")
    (tmp_path / "somebodys").mkdir()
    (tmp_path / "somebodys/__init__.py").write_text("")
    (tmp_path / "somebodys/trainer.py").write_text(MODULE)
    (tmp_path / "somebodys/other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ours._Importer, "NAME", "somebodys.trainer")
    monkeypatch.setattr(ours, "TrainerCheckpoints", Recorder)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("somebodys", "somebodys.trainer", "somebodys.other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    ours.serve_all()
    importlib.import_module("somebodys.other")
    return importlib.import_module("somebodys.trainer")


def test_a_trainer_has_ours_from_the_first_start_of_its_training_on(trainers: ModuleType):
    trainer = trainers.Trainer()
    assert trainer.train(3, trial=None) == trainer.train(4) == "ours trained"
    assert trainer.engine.asked == trainer.trained == [((3,), {"trial": None}), ((4,), {})]
    assert trainers.Trainer.train.__doc__ == "What the Trainer does."


def test_a_trainer_with_a_train_of_its_own_trains_once(trainers: ModuleType):
    trainer = trainers.Own()
    assert trainer.train(3) == "own ours trained"
    assert trainer.engine.asked == trainer.trained == [((3,), {"trial": None})]


def test_a_script_that_has_the_line_too_has_ours_once(trainers: ModuleType):
    trainer = trainers.Trainer()
    made = Recorder(trainer)
    assert trainer.train(3) == "ours trained" and trainer.engine is made and len(trainer.trained) == 1


def test_it_loads_as_it_would_without_us(trainers: ModuleType):
    assert trainers.__spec__.name == "somebodys.trainer" and trainers.__file__.endswith("somebodys/trainer.py")
    with pytest.raises(ModuleNotFoundError, match="somebodys.missing"):
        importlib.import_module("somebodys.missing")


@pytest.mark.parametrize(
    ("given", "engine"), [({}, None), ({"engine": "script"}, None), ({"engine": "cloudtrain"}, "cloudtrain")]
)
def test_ranks_are_told_where_the_job_asks_for_it_alone(given: dict, engine: str | None):
    assert Manifest.of(Job(entrypoint="train.py", checkpoint=given), "r", 1).checkpoint.get("engine") == engine
