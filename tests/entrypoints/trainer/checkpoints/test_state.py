"""A training's state, out and back: exact; and what a bad disk does to it."""

from __future__ import annotations

import pickletools
import random
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.entrypoints.training import ENTRYPOINTS

from trainer.checkpoints import files  # isort: skip
from trainer.checkpoints import state  # isort: skip
from trainer.checkpoints.manager import CheckpointManager  # isort: skip

assert ENTRYPOINTS


def training(seed: int) -> state.TrainingState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 7, bias=True))
    model[2].weight = model[0].weight  # tied, as language models have them
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[2].bias]}], lr=0.1, fused=True
    )
    return state.TrainingState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))


def steps(run: state.TrainingState, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = run.model(torch.randint(0, 7, (5,))).square().mean() + random.random() + float(np.random.rand())
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.schedule.step()
        losses.append(loss.item())
    return losses


def manager(folder: Path, attempt: int = 1, keep: int = 3) -> tuple[CheckpointManager, list, list]:
    events, said = [], []
    made = CheckpointManager(folder, attempt, keep, lambda kind, **data: events.append((kind, data)), said.append)
    return made, events, said


def pickled_names(data: bytes) -> set[str]:
    """Return the modules of all classes and functions that a pickle names."""
    pushed, memo, found = [], {}, set()
    for code, argument, _ in pickletools.genops(data):
        if code.name == "GLOBAL":
            found.add(argument.split(" ")[0])
        elif code.name == "STACK_GLOBAL":
            found.add(pushed[-2])
        elif code.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = pushed[-1] if pushed else None
        elif code.name in ("BINGET", "LONG_BINGET"):
            pushed.append(memo[argument])
        else:
            pushed.append(argument if isinstance(argument, str) else None)
    return found


def test_no_checkpoint_names_a_module_of_ours(tmp_path: Path):
    """Modules are moved and renamed; a checkpoint is read by later versions."""
    run, (keep, _, _) = training(1), manager(tmp_path)
    steps(run, 3)
    keep.save(3, run, {"step": 3, "epoch": 0, "best": {"value": None}}, {"meter": {"sums": torch.zeros(3), "steps": 2}})
    keep.wait()
    names = set()
    for path in files.folder_of(tmp_path, 3, 1).rglob("*"):
        if path.name == ".metadata":
            names |= pickled_names(path.read_bytes())
        elif path.suffix == ".pt":
            with zipfile.ZipFile(path) as archive:
                names |= set().union(
                    *(pickled_names(archive.read(name)) for name in archive.namelist() if name.endswith(".pkl"))
                )
    assert "torch.distributed.checkpoint.metadata" in names and "torch._utils" in names
    assert {name.partition(".")[0] for name in names} <= {"torch", "collections", "builtins", "_codecs", "pathlib"}


def test_out_and_back_is_exact(tmp_path: Path):
    one, (keep, events, _) = training(1), manager(tmp_path)
    steps(one, 3)
    keep.save(3, one, {"step": 3, "epoch": 0}, {"meter": {"steps": 2}})
    keep.wait()
    expected = steps(one, 4)
    [(kind, data)] = events
    assert kind == "checkpoint" and data["step"] == 3 and data["size_bytes"] > 0

    other, (keep, _, said) = training(2), manager(tmp_path, attempt=2)
    loop, mine = keep.resume(other)
    assert (loop, mine["meter"]) == ({"step": 3, "epoch": 0}, {"steps": 2})
    state.set_random_state(mine["random"])
    assert steps(other, 4) == expected
    assert said == [f"resumed from {tmp_path / 'step-00000003.a1'}"]
    assert keep.saved_step == 3, "it need not be written again"


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path):
    assert manager(tmp_path)[0].resume(training(1)) is None


@pytest.mark.parametrize("part", ["state/__0_0.distcp", "state/.metadata", "loop.pt", "rank-00000.pt"])
def test_a_byte_that_turned_costs_one_checkpoint(tmp_path: Path, part: str):
    run, (keep, _, _) = training(1), manager(tmp_path)
    for step in (1, 2):
        steps(run, 1)
        keep.save(step, run, {"step": step}, {})
        keep.wait()
    file = files.folder_of(tmp_path, 2, 1) / part
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)
    again, _, said = manager(tmp_path, attempt=2)
    loop, _ = again.resume(training(1))
    assert loop == {"step": 1}
    assert said[0] == f"checkpoint step-00000002.a1 is skipped: {part} differs from what was written"


def test_a_disk_that_takes_no_more_costs_the_checkpoint_not_the_training(tmp_path: Path):
    run, (keep, events, said) = training(1), manager(tmp_path)
    keep.save(1, run, {"step": 1}, {})
    keep.wait()
    blocked = files.folder_of(tmp_path, 2, 1)
    blocked.write_text("a file where the folder belongs")
    keep.save(2, run, {"step": 2}, {})
    keep.wait()
    assert events[-1][0] == "alarm" and "checkpoint of step 2 could not be written" in said[-1]
    assert keep.saved_step == 1
    blocked.unlink()
    keep.save(2, run, {"step": 2}, {})
    keep.wait()
    assert keep.saved_step == 2 and events[-1][0] == "checkpoint"


@pytest.mark.parametrize("room", [100, 1200, 2500, 5000])
def test_a_disk_that_is_full_at_any_file_costs_the_checkpoint_not_the_training(tmp_path: Path, room: int):
    """No file may be larger than `room`: state, loop or the ranks' own, which has 5 KB of random numbers, or all fail."""
    run, (keep, events, said) = training(1), manager(tmp_path)
    keep.save(1, run, {"step": 1}, {})
    keep.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        keep.save(2, run, {"step": 2}, {})
        keep.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [kind for kind, _ in events] == ["checkpoint", "alarm"]
    assert "the checkpoint of step 2 could not be written" in said[-1] and "File too large" in said[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.a1"], "it takes no room"
    keep.save(2, run, {"step": 2}, {})
    keep.wait()
    assert keep.saved_step == 2


def test_only_as_many_are_kept_as_are_asked_for(tmp_path: Path):
    run, (keep, _, _) = training(1), manager(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        keep.save(step, run, {"step": step}, {})
        keep.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003.a1", "step-00000004.a1"]
