"""Which watcher gets a run, what is known of it should that one die, and the watcher's own log. No process is started."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs.sending import handover, watch_log
from cloudtrain.runs.sending.handover import Mailbox, call
from cloudtrain.runs.submit import Submitter
from tests.runs.test_handover import box, started

__all__ = ["box", "started"]  # fixtures


@pytest.mark.parametrize(
    ("version", "other", "newer"),
    [
        ("1.10.0", "1.9.9", True),
        ("1.9.9", "1.10.0", False),
        ("1.0.0", "1.0.0", False),
        ("1.0.0+20", "1.0.0+3", True),
        ("1.0.0+3", "1.0.0+20", False),
        ("1.0.0", "1.0.0+3", False),
    ],
)
def test_a_version_is_compared_by_its_numbers_and_then_by_when_it_was_changed(version: str, other: str, newer: bool):
    assert handover.is_newer(version, other) is newer


@pytest.mark.parametrize(
    ("version", "valid", "answers", "told"),
    [
        ("2.0.0", True, True, True),
        ("3.0.0", True, True, True),
        ("1.0.0", True, True, False),
        ("2.0.0", False, True, False),
        ("2.0.0", True, False, True),
    ],
)
def test_a_run_goes_to_a_watcher_that_lives_and_is_not_older(
    memory, job, home, box, started, monkeypatch, version: str, valid: bool, answers: bool, told: bool
):
    holder = SimpleNamespace(address=str(box.path), is_valid=lambda _: valid, version=version)
    monkeypatch.setattr(Store, "watcher", lambda _: holder)
    monkeypatch.setattr(handover, "own_version", lambda: "2.0.0")
    if not answers:
        monkeypatch.setattr(handover, "_is_mine", lambda _: False)
    run = Submitter("memory").submit(job)
    assert [message["run"] for message in box.got] == [run.run_id] * (told and answers)
    assert len(started) == (0 if told and answers else 1)


def test_what_may_be_stored_of_the_shell_is_kept_before_a_watcher_is_started(memory, job, home, started, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "work")
    run = Submitter("memory").submit(job.replace(secrets={"TOKEN": ["env:PLANTED"]}))
    record = run.store.environments([run.run_id])[run.run_id]
    assert record.pointers["AWS_PROFILE"] == "work" and "PLANTED" not in record.pointers
    assert "PLANTED" in record.hidden and record.lacking == record.hidden
    reader = Submitter("memory", watch=False).submit(job.replace(name="other"))
    os.utime(home / handover.STARTING, (time.time() - 2 * handover.BIRTH_S,) * 2)
    handover.start(reader.store, reader.attempts[0].plan, instead=True)
    assert len(started) == 2 and not reader.store.environments([reader.run_id]), "a reader's shell is another one"


@pytest.mark.parametrize("age_s", [-2 * handover.BIRTH_S, 2 * handover.BIRTH_S])
def test_a_marker_of_another_time_says_nothing(home, started, age_s: float):
    marker = handover.starting(home, "s1")
    marker.parent.mkdir(parents=True)
    marker.touch()
    os.utime(marker, (time.time() - age_s,) * 2)
    assert handover.drive(home, "s1", {}) and len(started) == 1
    assert not handover.drive(home, "s1", {}) and handover.drive(home, "s2", {})


def test_a_message_has_a_bound(box, monkeypatch):
    monkeypatch.setattr(handover, "MOST_BYTES", 100)
    assert call(str(box.path), {"text": "x" * 200_000}) is None and box.got == []
    assert call(str(box.path), {"do": "look"}) == {"number": 1, "text": None}


def test_a_file_system_without_sockets_has_the_mailbox_elsewhere(quick_folder: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(quick_folder))
    (quick_folder / "taken").write_text("")
    made = Mailbox(quick_folder / "taken", "socket", lambda message: message)
    try:
        assert made.path.parent.parent == quick_folder and made.path.name == "socket"
        assert made.path.parent.stat().st_mode & 0o777 == 0o700 and made.path.stat().st_mode & 0o777 == 0o600
        assert call(str(made.path), {"a": 1}) == {"a": 1}
    finally:
        made.close()


@pytest.mark.parametrize(
    ("name", "size", "moved"), [("watch.log", 11, True), ("watch.log", 10, False), ("x", 11, False)]
)
def test_the_watchers_log_is_kept_short(tmp_path: Path, monkeypatch, name: str, size: int, moved: bool):
    monkeypatch.setattr(watch_log, "MOST_BYTES", 10)
    log, older = tmp_path / name, tmp_path / f"{name}.1"
    older.write_text("older")
    log.write_text("x" * size)
    before = os.dup(2)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 2)
        try:
            watch_log.bound()
            os.write(2, b"more")
        finally:
            os.dup2(before, 2)
            os.close(before)
    assert (log.read_text(), older.read_text()) == (("more", "x" * size) if moved else ("x" * size + "more", "older"))


def test_a_line_of_the_watchers_log_begins_with_the_time(capsys, monkeypatch):
    monkeypatch.setattr(watch_log, "now", lambda: "2026-11-30T10:00:00Z")
    watch_log.write(KeyError("x"))
    assert capsys.readouterr() == ("", "2026-11-30T10:00:00Z 'x'\n")


def test_what_only_reads_adds_to_the_log_of_the_home_and_prints_what_it_cannot_add(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(watch_log, "now", lambda: "2026-11-30T10:00:00Z")
    for text in ("no answer", "é"):
        watch_log.write(text, tmp_path)
        watch_log.write(text, tmp_path / "a home that is gone")
    assert (tmp_path / "watch.log").read_text("utf-8") == "2026-11-30T10:00:00Z no answer\n2026-11-30T10:00:00Z é\n"
    assert capsys.readouterr() == ("", "2026-11-30T10:00:00Z no answer\n2026-11-30T10:00:00Z é\n")
    assert [path.name for path in tmp_path.iterdir()] == ["watch.log"]
