"""Which checkpoint a script of one's own goes on from: its own, those of the Hugging Face Trainer, those of Accelerate."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import cloudtrain_runtime as runtime
import cloudtrain_script_checkpoints as script_checkpoints
import pytest
from trainer.checkpoints import files

from tests.conftest import WAIT_S
from tests.entrypoints.training import Warm

# Both tools write their own folders; nothing of ours is imported.
WRITER = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x)[:, 0] - labels).pow(2).mean()}

data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(16)]
arguments = TrainingArguments(sys.argv[1], max_steps=12, save_steps=4, per_device_train_batch_size=2, use_cpu=True,
                              report_to=[], disable_tqdm=True)
Trainer(Model(), arguments, train_dataset=data).train()
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[2], automatic_checkpoint_naming=True))
model = accelerator.prepare(torch.nn.Linear(4, 1))
for _ in range(3):
    accelerator.save_state()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    (folder / "write.py").write_text(WRITER)
    command = [str(folder / name) for name in ("write.py", "trainer", "accelerate")]
    log = folder / "log"
    assert Warm(command, {**os.environ, "HF_HUB_OFFLINE": "1"}, log, folder).wait(2 * WAIT_S) == 0, log.read_text()
    return folder


@pytest.fixture
def trainers(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "trainer", tmp_path / "trainer"))


@pytest.fixture
def accelerates(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "accelerate", tmp_path / "accelerate"))


def newest(folder: Path) -> str | None:
    found = runtime.latest_checkpoint(str(folder))
    return None if found is None else os.path.relpath(found, folder)


def test_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert newest(tmp_path) is None and newest(tmp_path / "absent") is None
    monkeypatch.setenv("CLOUDTRAIN_CHECKPOINT_DIR", str(tmp_path / "own"))
    assert runtime.latest_checkpoint() is None


def test_the_trainers_newest_by_its_number(trainers: Path):
    assert sorted(path.name for path in trainers.iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    assert newest(trainers) == "checkpoint-12"


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 2)  # JSON may end with a newline


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_a_trainers_folder_that_is_cut_off_is_passed_over(
    trainers: Path, capsys: pytest.CaptureFixture[str], name: str
):
    cut(trainers / "checkpoint-12" / name)
    assert newest(trainers) == "checkpoint-8"
    assert f"checkpoint checkpoint-12 is skipped: {name} is cut off" in capsys.readouterr().err
    (trainers / "checkpoint-8" / "trainer_state.json").unlink()  # the Trainer writes it late
    assert newest(trainers) == "checkpoint-4"


def test_accelerates_newest(accelerates: Path, capsys: pytest.CaptureFixture[str]):
    assert newest(accelerates) == "checkpoints/checkpoint_2"
    cut(accelerates / "checkpoints/checkpoint_2/random_states_0.pkl")
    assert newest(accelerates) == "checkpoints/checkpoint_1"
    (accelerates / "checkpoints/checkpoint_1/random_states_0.pkl").unlink()
    assert newest(accelerates) == "checkpoints/checkpoint_0"
    assert "it is incomplete" in capsys.readouterr().err


def own(folder: Path, step: int) -> Path:
    path = folder / f"mine-{step}"
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "state").write_bytes(os.urandom(3 << 20))
    (path / "empty").touch()
    runtime.complete_checkpoint(str(path), step=step)
    return path


def test_a_scripts_own_is_compared_with_its_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for step in (9, 10, 100):
        own(tmp_path, step)
    assert '"kind":"checkpoint","step":100' in capsys.readouterr().out
    (tmp_path / "mine-200").mkdir()  # begun, not finished
    assert newest(tmp_path) == "mine-100"
    with open(tmp_path / "mine-100/deep/state", "r+b") as file:  # one bit
        file.seek(2 << 20)
        byte = file.read(1)[0]
        file.seek(2 << 20)
        file.write(bytes([byte ^ 1]))
    assert newest(tmp_path) == "mine-10"
    assert "deep/state differs from what was written" in capsys.readouterr().err
    (tmp_path / "mine-10/empty").unlink()
    (tmp_path / "mine-9/COMPLETE").write_text("{")
    assert newest(tmp_path) is None
    assert "mine-9 is skipped: its COMPLETE cannot be read" in capsys.readouterr().err


def test_the_mark_is_the_one_that_our_trainer_and_launcher_read(tmp_path: Path):
    path = own(tmp_path, 7)
    assert files.damage(path) is None
    mark = json.loads((path / "COMPLETE").read_text())
    assert (mark["version"], mark["step"], sorted(mark["files"])) == (files.VERSION, 7, ["deep/state", "empty"])
    cut(path / "deep/state")
    assert "deep/state" in str(files.damage(path)) and newest(tmp_path) is None


# -- two starts at once -----------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str | None]]:
    """Return what begins an attempt of a run, as its script does: its number as a start, and from where it goes on."""
    monkeypatch.setenv("CLOUDTRAIN_RUN_ID", "run")
    monkeypatch.setenv("CLOUDTRAIN_CHECKPOINT_DIR", str(tmp_path))

    def begin(attempt: int, given: int = 0) -> tuple[int, str | None]:
        monkeypatch.setenv("CLOUDTRAIN_ATTEMPT", str(attempt))
        monkeypatch.setenv("CLOUDTRAIN_EPOCH", str(given or ""))
        monkeypatch.setattr(script_checkpoints, "_epoch", 0)
        found = runtime.latest_checkpoint()
        return script_checkpoints._epoch, found and Path(found).name

    yield begin


def written_by(epoch: int, folder: Path, step: int) -> None:
    script_checkpoints._epoch = epoch
    own(folder, step)


def test_what_a_stale_start_completes_is_never_chosen(
    tmp_path: Path, start: Callable, capsys: pytest.CaptureFixture[str]
):
    assert start(1) == (1, None)
    written_by(1, tmp_path, 3)
    assert start(2) == (2, "mine-3")
    assert "alarm" not in capsys.readouterr().out
    written_by(1, tmp_path, 6)  # it lives on behind a partition that has healed
    assert "start 2 of this run has started: checkpoints of this one, 1, are no longer used" in capsys.readouterr().out
    assert start(3) == (3, "mine-3"), "the second wrote nothing"
    said = capsys.readouterr().err
    assert "checkpoint mine-6 is skipped: it was written by a start of this run that a later start replaced" in said
    written_by(2, tmp_path, 9)
    written_by(3, tmp_path, 4)
    assert start(3) == (4, "mine-4"), "a platform started the third again by itself"
    assert runtime.latest_checkpoint() == str(tmp_path / "mine-4") and script_checkpoints._epoch == 4, (
        "a start is recorded once"
    )


def test_older_ones_of_the_history_are_removed_and_what_is_not_whole_counts_for_none(tmp_path: Path, start: Callable):
    (tmp_path / "checkpoint-1").mkdir()  # the script's own matter: it has no mark
    assert start(1) == (1, None)
    for step in (2, 3, 4, 9):
        written_by(1, tmp_path, step)
    shutil.rmtree(tmp_path / "mine-9")
    assert start(2) == (2, "mine-4")
    written_by(1, tmp_path, 8)  # outside of the history
    written_by(2, tmp_path, 6)
    written_by(2, tmp_path, 7)
    cut(tmp_path / "mine-7/deep/state")
    script_checkpoints.prune(str(tmp_path), 2, spare="mine-2")
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"mine-{step}" for step in (2, 4, 6, 7, 8)),
        "checkpoint-1",
        "epochs",
    }
    script_checkpoints.prune(str(tmp_path), 1)
    assert {path.name for path in tmp_path.iterdir()} == {"mine-6", "mine-7", "checkpoint-1", "epochs"}


def stand_in(args: SimpleNamespace, **more: object) -> SimpleNamespace:
    """Return what has the names of a Trainer that ours takes over."""
    taken = ("train", "_save_checkpoint", "_get_train_sampler", "get_train_dataloader", "_issue_warnings_after_load")
    return SimpleNamespace(args=args, add_callback=print, **dict.fromkeys(taken, print), **more)


def test_a_trainer_whose_run_a_later_start_has_taken_ends_and_leaves_nothing(tmp_path: Path, start: Callable):
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=None)
    trainer = stand_in(args)

    def committed(epoch: int, step: int) -> dict:
        script_checkpoints._epoch = epoch
        partial = tmp_path / f".cloudtrain-part-{epoch}" / f"checkpoint-{step}"
        partial.mkdir(parents=True)
        (partial / "trainer_state.json").write_text("{}")
        return ours._commit(str(partial), str(tmp_path / partial.name), step, "")

    assert start(1) == (1, None)
    ours = runtime.TrainerCheckpoints(trainer, keep=1)
    assert committed(1, 2)["path"] == committed(1, 4)["path"].replace("-4", "-2") == str(tmp_path / "checkpoint-2")
    assert start(2) == (2, "checkpoint-4")
    assert "start 2 of this run has started" in (last := committed(1, 6))["replaced"]
    ours._writing = Future()
    ours._writing.set_result(last)
    with pytest.raises(RuntimeError, match="start 2 of this run has started"):
        ours.wait()
    assert committed(2, 4)["step"] == 4, "in the place of the earlier start's"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-4", "epochs"] and start(3) == (3, "checkpoint-4")


@pytest.mark.parametrize(
    ("batch", "accumulated", "world", "fitted"),
    [(4, 1, 2, (4, 1)), (4, 1, 1, (4, 2)), (4, 2, 4, (2, 1)), (16, 1, 1, (8, 1)), (3, 1, 2, (2, 2)), (4, 1, 3, None)],
)
def test_a_step_of_a_trainer_has_the_samples_that_it_had_before(tmp_path, batch, accumulated, world, fitted):
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "world_size": world}
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=None, seed=1, **sizes)
    ours = runtime.TrainerCheckpoints(stand_in(args, _train_batch_size=batch))
    ours._fit(None)
    assert (ours._ours, ours._reseed, args.gradient_accumulation_steps) == (True, "", accumulated)
    ours._fit(str(tmp_path))
    assert not ours._ours, "the Trainer alone wrote it"
    (tmp_path / "cloudtrain.json").write_text(json.dumps({"step_size": 8, "world_size": 2}))
    if fitted is None:
        with pytest.raises(ValueError, match="8 samples a step, which 3 ranks cannot share"):
            ours._fit(str(tmp_path))
        return
    ours._fit(str(tmp_path))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == fitted
    assert ours.trainer._train_batch_size == fitted[0] and ours._step_size() == 8
    assert bool(ours._reseed) == (world != 2)


def test_the_launchers_number_is_the_starts(tmp_path: Path, start: Callable, monkeypatch: pytest.MonkeyPatch):
    assert start(1, given=5) == (5, None)
    written_by(5, tmp_path, 1)
    assert start(1, given=5) == (6, "mine-1"), "unless another has recorded itself under it"
    monkeypatch.setenv("RANK", "1")
    assert start(2) == (0, "mine-1"), "rank 0 speaks for all"
    assert sorted(os.listdir(tmp_path / "epochs")) == ["00000005.json", "00000006.json"]


def test_a_start_that_cannot_be_recorded_goes_on_all_the_same(
    tmp_path: Path, start: Callable, capsys: pytest.CaptureFixture[str]
):
    own(tmp_path, 2)
    (tmp_path / "epochs").write_text("a file where the folder belongs")
    assert start(1) == (0, "mine-2")
    assert "could not be recorded" in capsys.readouterr().err
