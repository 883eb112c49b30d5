"""A copy of a home: its commands leave the jobs of the original alone, unless --take-over is given."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.job import homes
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import handover
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch


@pytest.fixture
def copied(memory, job, home, tmp_path, monkeypatch):
    """A live run, and the environment of a copy of its home."""
    monkeypatch.setattr(handover, "start", lambda *_, **__: None)
    run = Submitter("memory", watch=False).submit(job)
    run.store.database.close()
    shutil.copytree(home, tmp_path / "copy")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "copy"))
    return run


def state(run: Run) -> State:
    return MemoryBackend({}, Path()).status(f"{run.run_id}-a1").state


@pytest.mark.parametrize("used", [False, True])
def test_cancel_leaves_a_job_of_the_original_alone(copied, job, cli, home, used: bool):
    if used:  # what the copy submits itself is its own
        own = Submitter("memory", watch=False).submit(job.replace(name="own"))
        assert cli("cancel", own.run_id)[0] == 0 and state(own) is State.CANCELLED
    code, _, said = cli("cancel", copied.run_id)
    assert code == 2 and f"{os.uname().nodename}:{home}, of which this home is a copy" in said and "--take-over" in said
    with pytest.raises(BadRequest, match="is a copy"):  # as the console cancels
        Run.find(copied.run_id).cancel()
    assert not state(copied).final and not Run.find(copied.run_id).record.cancel_requested
    assert cli("cancel", "--take-over", copied.run_id)[0] == 0 and state(copied) is State.CANCELLED


def test_rm_leaves_what_the_original_has_alone(copied, cli, monkeypatch, home):
    MemoryBackend.finish(newest(copied), State.SUCCEEDED, 0)
    watch(Run.find(copied.run_id))
    code, _, said = cli("rm", "-y", copied.run_id)
    assert code == 2 and "is a copy" in said and Run.find(copied.run_id)
    assert cli("rm", "-y", "--dry-run", "--take-over", copied.run_id)[0] == 0
    assert cli("rm", "-y", "--here", copied.run_id)[0] == 0, "what is on this machine alone"
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(home))
    assert cli("rm", "-y", copied.run_id)[0] == 0, "the original's own"


def test_resume_leaves_a_run_of_the_original_alone(copied, cli):
    MemoryBackend.finish(newest(copied), State.FAILED, 1)
    watch(run := Run.find(copied.run_id))
    code, _, said = cli("resume", copied.run_id)
    assert code == 2 and "is a copy" in said and "--take-over" in said and len(run.attempts) == 1
    assert cli("resume", "--take-over", copied.run_id)[0] == 0 and len(run.attempts) == 2
    assert MemoryBackend.attempts[f"{run.run_id}-a2"]


def test_a_copy_that_is_the_root_of_another_volume_is_one(tmp_path):
    """The roots of two volumes have one inode."""
    first, copy = tmp_path / "home", tmp_path / "copy"
    known = homes.home_id(first)
    shutil.copytree(first, copy)
    note = json.loads((copy / homes.PLACE_FILE).read_text())
    (copy / homes.PLACE_FILE).write_text(json.dumps(note | {"inode": copy.stat().st_ino}))
    assert homes.original_of(copy, known).endswith(f":{first}")
    note = json.loads((first / homes.PLACE_FILE).read_text())
    (first / homes.PLACE_FILE).write_text(json.dumps(note | {"path": str(copy)}))
    assert not homes.original_of(first, known), "the home itself, mounted elsewhere"


def test_a_home_that_was_moved_is_no_copy(copied, cli, home, monkeypatch):
    moved = home.with_name("moved")
    home.rename(moved)
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(moved))
    assert cli("cancel", copied.run_id)[0] == 0 and state(copied) is State.CANCELLED


def test_a_home_restored_on_another_file_system_is_no_copy(tmp_path):
    first = tmp_path / "home"
    known = homes.home_id(first)
    first.rename(tmp_path / "backup")
    shutil.copytree(tmp_path / "backup", first)
    assert homes.home_id(first) == known and not homes.original_of(first, known)


def test_two_copies_and_the_home_have_ids_of_their_own(tmp_path):
    first = tmp_path / "home"
    known = homes.home_id(first)
    for name in ("second", "third"):
        shutil.copytree(first, tmp_path / name)
        assert homes.original_of(tmp_path / name, known).endswith(f":{first}")
    ids = {known, *(homes.home_id(tmp_path / name) for name in ("second", "third"))}
    assert len(ids) == 3 and homes.home_id(first) == known
    shutil.copytree(tmp_path / "third", tmp_path / "fourth")
    assert homes.original_of(tmp_path / "fourth", known).endswith(f":{first}")


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"path": 1}', '{"origins": 3, "path": "/", "inode": 0, "host": ""}']
)
def test_a_damaged_note_of_the_place_stands_in_no_way(tmp_path, damage: str):
    known = homes.home_id(tmp_path)
    (tmp_path / homes.PLACE_FILE).write_text(damage)
    assert homes.original_of(tmp_path, known) == "" and homes.home_id(tmp_path) == known
