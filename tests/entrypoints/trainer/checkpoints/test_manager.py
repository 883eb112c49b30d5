"""A checkpoint that is written while the training goes on: it is of the moment of the save, one at a time, and told."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.entrypoints.trainer.checkpoints.test_state import manager, steps, training
from tests.entrypoints.training import ENTRYPOINTS

from trainer.checkpoints import files  # isort: skip
from trainer.checkpoints import memory  # isort: skip
from trainer.checkpoints import state  # isort: skip

assert ENTRYPOINTS
WAIT_S = 120.0


def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no checkpoint become complete before the event is set."""
    gate, commit = threading.Event(), files.commit
    monkeypatch.setattr(files, "commit", lambda *a, **facts: (gate.wait(WAIT_S), commit(*a, **facts))[1])
    return gate


def test_what_is_written_is_of_the_moment_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = held(monkeypatch)
    one, (keep, events, said) = training(1), manager(tmp_path)
    steps(one, 3)
    place = {"step": 3, "list": [1]}
    keep.save(3, one, place, {"meter": {"steps": 2}})
    place["list"].append(2)
    expected = steps(one, 4)
    keep.report_results()
    assert keep.busy and not keep.due(0.0) and (events, said, keep.saved_step) == ([], [], -1)
    assert files.newest(tmp_path, lambda _: None) is None, "nobody may choose it yet"
    gate.set()
    keep.wait()
    [(kind, data)] = events
    assert (kind, data["step"], keep.saved_step, keep.busy) == ("checkpoint", 3, 3, False)
    assert 0 < data["stood_s"] <= data["seconds"]

    other, (again, _, _) = training(2), manager(tmp_path, attempt=2)
    loop, mine = again.resume(other)
    assert loop == {"step": 3, "list": [1]}
    state.set_random_state(mine["random"])
    assert steps(other, 4) == expected


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate, done = held(monkeypatch), []
    tensors, commit = state.tensors, files.commit
    monkeypatch.setattr(state, "tensors", lambda run: (done.append("taken"), tensors(run))[1])
    monkeypatch.setattr(files, "commit", lambda *a, **f: (commit(*a, **f), done.append("written"))[0])
    run, (keep, events, _) = training(1), manager(tmp_path)
    keep.save(1, run, {"step": 1}, {})
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    keep.save(2, run, {"step": 2}, {})
    keep.wait()
    opener.join()
    assert done == ["taken", "written", "taken", "written"]
    assert [data["step"] for _, data in events] == [1, 2]


def test_a_failure_is_told_at_the_next_save_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commit = files.commit

    def full(path: Path, **facts: object) -> int:
        if facts["step"] != 2:
            raise OSError(28, "No space left on device")
        return commit(path, **facts)

    monkeypatch.setattr(files, "commit", full)
    run, (keep, events, said) = training(1), manager(tmp_path)
    keep.save(1, run, {"step": 1}, {})
    keep.save(2, run, {"step": 2}, {})
    assert [kind for kind, _ in events] == ["alarm"] and "step 1 could not be written" in said[-1]
    keep.save(3, run, {"step": 3}, {})
    keep.wait()
    assert [kind for kind, _ in events] == ["alarm", "checkpoint", "alarm"]
    assert keep.saved_step == 2 and [path.name for path in tmp_path.iterdir()] == ["step-00000002.a1"]


def test_what_is_no_matter_of_the_disk_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "commit", lambda *_, **__: 1 // 0)
    run, (keep, _, _) = training(1), manager(tmp_path)
    keep.save(1, run, {"step": 1}, {})
    with pytest.raises(ZeroDivisionError):
        keep.wait()


def test_the_copy_is_made_once(tmp_path: Path):
    """Memory that is taken anew at each save costs most of its time."""
    run, copy = training(1), state.HostCopy()
    steps(run, 1)

    def places(state: dict) -> list[int]:
        values = [*state["model"].values(), *state["optimizer"].values()]
        return [value.data_ptr() for value in values if isinstance(value, torch.Tensor) and value.dim()]

    live = places(state.tensors(run))
    first = places(copy(state.tensors(run)))
    steps(run, 1)
    assert first == places(copy(state.tensors(run))) and not set(first) & set(live)


def test_without_room_for_a_copy_the_training_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 100.0)
    run, (keep, events, said) = training(1), manager(tmp_path)
    keep.save(1, run, {"step": 1}, {})
    assert keep.saved_step == 1 and not keep.busy and events[0][0] == "checkpoint"
    assert said == ["training pauses while a checkpoint is written: a copy of the state takes 0.0 GB, 0.0 GB are free"]


def test_free_memory_is_the_machines_or_the_containers(tmp_path: Path):
    machine, container = tmp_path / "meminfo", tmp_path / "cgroup"
    assert memory.free_bytes(machine, container) == float("inf")
    machine.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert memory.free_bytes(machine, container) == 4000 * 1024
    container.mkdir()
    for name, text in {"max": "3000000", "current": "2500000", "stat": "anon 7\ninactive_file 400000"}.items():
        (container / f"memory.{name}").write_text(text + "\n")
    assert memory.free_bytes(machine, container) == 900_000
    (container / "memory.max").write_text("max\n")
    assert memory.free_bytes(machine, container) == 4000 * 1024


def test_killed_anywhere_behind_the_training_it_leaves_a_whole_checkpoint(tmp_path: Path):
    """The process trains on while the thread writes, and dies before each call with which that changes the disk."""
    run, (keep, _, _) = training(1), manager(tmp_path / "whole")
    keep.save(1, run, {"step": 1}, {})
    keep.wait()
    command = [sys.executable, str(Path(__file__).with_name("killing.py")), str(tmp_path), "behind"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [[int(word) for word in line.split()] for line in lines]
    assert len(rows) > 15 and [row[1] for row in rows] == [signal.SIGKILL] * (len(rows) - 1) + [0]
    assert rows[0][2:] == [1, 1] and rows[-1][2:] == [2, 2]
    assert all(row[2] in row[3:] for row in rows), "what is chosen is whole"
    assert [row[2] for row in rows] == sorted(row[2] for row in rows), "the later it dies the newer is what is chosen"


def test_a_torch_that_cannot_copy_writes_at_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As torch 2.8, which has no DefaultStager."""
    from torch.distributed.checkpoint import staging

    monkeypatch.delattr(staging, "DefaultStager")
    run, (keep, events, said) = training(1), manager(tmp_path)
    steps(run, 2)
    for step in (1, 2):
        keep.save(step, run, {"step": step}, {})
        assert not keep.busy and keep.saved_step == step and events[-1][1]["step"] == step
    assert said == ["training pauses while a checkpoint is written; with torch 2.9 or newer it continues"]
