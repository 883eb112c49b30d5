"""Checkpoint folders: only whole ones are chosen, and the newest of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.entrypoints.training import ENTRYPOINTS

from trainer.checkpoints import files  # isort: skip

assert ENTRYPOINTS


def write(folder: Path, step: int, attempt: int = 1) -> Path:
    path = files.folder_of(folder, step, attempt)
    files.begin(path)
    (path / "state").mkdir()
    (path / "state" / "part").write_bytes(b"weights" * 50)
    (path / "loop.pt").write_bytes(b"%d" % step)
    assert files.commit(path, step=step) == 350 + len(str(step))
    return path


def newest(folder: Path) -> tuple[str | None, list[str]]:
    said: list[str] = []
    found = files.newest(folder, said.append)
    return found and found.path.name, said


def test_the_newest_is_chosen_and_a_later_attempt_is_newer(tmp_path: Path):
    assert newest(tmp_path / "none") == (None, [])
    write(tmp_path, 3)
    write(tmp_path, 20)
    assert newest(tmp_path) == ("step-00000020.a1", [])
    write(tmp_path, 9, attempt=2)  # of an attempt that went on from 3: what a stale one wrote at 20 is not its past
    (tmp_path / "notes").mkdir()
    assert newest(tmp_path) == ("step-00000009.a2", [])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "no marker": (lambda path: (path / "COMPLETE").unlink(), "it is incomplete"),
    "flipped bit": (lambda path: flip(path / "state" / "part"), "state/part differs from what was written"),
    "shorter": (lambda path: (path / "loop.pt").write_bytes(b""), "loop.pt has 0 bytes instead of 1"),
    "missing": (lambda path: (path / "loop.pt").unlink(), "loop.pt is missing"),
    "torn marker": (lambda path: (path / "COMPLETE").write_text('{"version": 1, "fi'), "its COMPLETE cannot be read"),
    "other marker": (lambda path: (path / "COMPLETE").write_text("[]"), "its COMPLETE cannot be read"),
    "empty marker": (lambda path: (path / "COMPLETE").write_text(""), "its COMPLETE is empty, so that nothing can be"),
    "marker of a folder": (lambda path: swap(path / "COMPLETE"), "its COMPLETE cannot be read"),
    "later version": (lambda path: (path / "COMPLETE").write_text('{"version": 2}'), "version 2"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_never_chosen(tmp_path: Path, kind: str):
    damage, reason = DAMAGE[kind]
    write(tmp_path, 3)
    damage(write(tmp_path, 6))
    name, [said] = newest(tmp_path)
    assert name == "step-00000003.a1"
    assert said.startswith("checkpoint step-00000006.a1 is skipped: ") and reason in said


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("run")
    path = write(folder, 1)
    file = path / data.draw(st.sampled_from(["state/part", "loop.pt"]))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    assert files.damage(path) is not None


def test_what_an_interrupted_save_left_is_written_over(tmp_path: Path):
    torn = files.folder_of(tmp_path, 5, 1)
    (torn / "state").mkdir(parents=True)
    (torn / "rest").write_text("of another time")
    path = write(tmp_path, 5)
    assert path == torn and files.damage(path) is None
    assert "rest" not in json.loads((path / "COMPLETE").read_text())["files"]


def test_pruning_keeps_the_newest_complete_ones(tmp_path: Path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (files.folder_of(tmp_path, 2, 1) / "COMPLETE").unlink()
    (files.folder_of(tmp_path, 5, 1)).mkdir()  # being written
    files.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}.a1" for step in (3, 4, 5)]
    (files.folder_of(tmp_path, 4, 1) / "COMPLETE").unlink()
    files.prune(tmp_path, 2)
    assert (files.folder_of(tmp_path, 3, 1)).exists(), "one complete is left, so nothing may go"


def test_pruning_spares_the_best_one(tmp_path: Path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    files.prune(tmp_path, 1, spare="step-00000002.a1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002.a1", "step-00000004.a1"]
    files.prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004.a1"]


def test_pruning_counts_only_what_is_still_what_was_written(tmp_path: Path):
    """With two of four damaged, the other two stay, and what is damaged makes nobody go."""
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    flip(files.folder_of(tmp_path, 4, 1) / "state" / "part")
    (files.folder_of(tmp_path, 2, 1) / "loop.pt").write_bytes(b"")
    verified: set[str] = set()
    files.prune(tmp_path, 2, verified=verified)
    assert len(list(tmp_path.iterdir())) == 4 and verified == {"step-00000003.a1", "step-00000001.a1"}
    write(tmp_path, 5)
    files.prune(tmp_path, 2, verified=verified)
    assert [found.step for found in files.find(tmp_path)] == [5, 4, 3]
    (files.folder_of(tmp_path, 5, 1) / "loop.pt").unlink()  # what was verified once must still be there
    write(tmp_path, 6)
    files.prune(tmp_path, 2, verified=verified)
    assert [found.step for found in files.find(tmp_path)] == [6, 5, 4, 3]


@pytest.mark.parametrize("what, number", [("calls", signal.SIGKILL), ("bytes", signal.SIGXFSZ)])
def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(tmp_path: Path, what: str, number: int):
    write(tmp_path / "whole", 1)
    command = [sys.executable, str(Path(__file__).with_name("killing.py")), str(tmp_path), what]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [[int(word) for word in line.split()] for line in lines]
    assert len(rows) > 20 and [row[1] for row in rows] == [number] * (len(rows) - 1) + [0]
    assert {row[2] for row in rows[:-1]} == ({1, 2} if what == "calls" else {1})
    assert rows[0][2:] == [1, 1] and rows[-1][2:] == [2, 2]
    assert all(row[2] in row[3:] for row in rows), "what is chosen is whole"
    assert [row[2] for row in rows] == sorted(row[2] for row in rows), "the later it dies the newer is what is chosen"
