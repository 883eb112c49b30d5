"""A start that a newer one has replaced on a shared folder does not succeed, whatever its script does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from launcher.errors import Refused
from launcher.output import starts
from launcher.output.starts import FOLDER, SILENT_S, Starts

from tests.conftest import WAIT_S
from tests.entrypoints.launching import Attempt

# Writes the model when it is told to go, or when it cancel requested.
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
open(os.environ["CLOUDTRAIN_MODEL_DIR"] + "/model", "w").close()
"""
# A newer attempt begins just before this one ends.
LAST_MOMENT = """
import os
run = os.path.dirname(os.environ["CLOUDTRAIN_MODEL_DIR"])
open(run + "/starts/00020001", "x").close()
"""
# Writes the model again and again, whatever it is asked.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    with open(os.environ["CLOUDTRAIN_MODEL_DIR"] + "/model", "w") as file:
        file.write("older")
    print("written", flush=True)
    time.sleep(0.05)
"""
NEWER = """
import os
with open(os.environ["CLOUDTRAIN_MODEL_DIR"] + "/model", "w") as file:
    file.write("newer")
"""


def test_each_start_has_a_number_of_its_own(tmp_path: Path):
    first, again = Starts(str(tmp_path), 1), Starts(str(tmp_path), 1)
    assert again.replaced() == ""
    assert first.replaced() == "a later launcher of attempt 1 of this run has started and replaces this one, which ends"
    second = Starts(str(tmp_path), 2)
    assert second.replaced() == ""
    assert again.replaced() == "attempt 2 of this run has started and replaces this one, which ends"
    with pytest.raises(Refused, match="attempt 2 of this run has started: attempt 1 does not start"):
        Starts(str(tmp_path), 1)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["00010001", "00010002", "00020001"]


def test_two_starts_at_once_take_two_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    look = Starts._newest

    def stale(self: Starts) -> int:
        """Another start claims between the look and the claim."""
        monkeypatch.setattr(Starts, "_newest", look)
        found = look(self)
        Starts(str(tmp_path), 1)
        return found

    monkeypatch.setattr(Starts, "_newest", stale)
    assert Starts(str(tmp_path), 1).replaced() == ""
    assert len(list((tmp_path / FOLDER).iterdir())) == 2


def test_a_replaced_start_ends_and_writes_no_model(tmp_path: Path):
    with Attempt(tmp_path, DEAF) as attempt:
        attempt.start().heard("up")
        newer = Starts(str(tmp_path / "run"), 2)
        assert attempt.wait() == [78]
        status = attempt.status()
        assert status["state"] == "FAILED"
        assert status["reason"] == "attempt 2 of this run has started and replaces this one, which ends"
        assert not attempt.left() and not list((tmp_path / "run" / "model").iterdir())
        assert newer.replaced() == ""


def test_the_model_is_the_newer_starts_though_the_older_one_writes_until_it_is_killed(tmp_path: Path):
    """The older launcher looks every 4 s only, and none of the two is ever taken for silent."""
    run = {"CLOUDTRAIN_RUN_DIR": str(tmp_path / "run")}
    older, newer = Attempt(tmp_path / "1", STUBBORN, environ=run), Attempt(tmp_path / "2", NEWER, environ=run)
    with older.set("supervisor", "TICK_S", 4.0), newer.set("output/starts", "SILENT_S", 600.0) as newer:
        newer.set("output/starts", "OVERLAP_S", 600.0)
        older.start().heard("written", times=2)
        assert newer.run() == [0]
        assert (tmp_path / "run" / "model" / "model").read_text() == "newer"
        assert older.wait() == [78] and not older.left()
        assert (tmp_path / "run" / "model" / "model").read_text() == "newer"


def test_a_start_waits_for_the_end_of_the_one_before(tmp_path: Path):
    first, second = Starts(str(tmp_path), 1), Starts(str(tmp_path), 2)
    waiting = threading.Thread(target=second.await_earlier)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    first.end()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    "text",
    ["another/machine 1 1", "", f"{starts._machine()} {os.getpid()} 1", f"{starts._machine()} 4194305 1"],
    ids=["another machine", "older version", "pid used again", "no process"],
)
def test_a_start_that_shows_no_life_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    """One of another machine, or of an older version, has been silent; one of this machine is no process any more."""
    monkeypatch.setattr(starts, "OVERLAP_S", -1.0)
    first, second = Starts(str(tmp_path), 1), Starts(str(tmp_path), 2)
    assert second.await_earlier() == "attempt 1 of this run still runs, and both write to the same folders"
    Path(first._path).write_text(text)
    if not text.startswith(starts._machine()):
        assert second.await_earlier(), "it was written to just now"
        claimed = os.stat(second._path).st_mtime
        os.utime(first._path, (claimed, claimed - SILENT_S - 60))
    assert second.await_earlier() == ""


def test_a_start_that_runs_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = Starts(str(tmp_path), 1)
    os.utime(start._path, (0, 0))
    start.beat()
    assert os.stat(start._path).st_mtime == 0, "not all the time"
    monkeypatch.setattr(starts, "BEAT_S", 0.0)
    start.beat()
    assert os.stat(start._path).st_mtime > 0


def test_a_start_that_is_replaced_while_it_ends_has_not_succeeded(tmp_path: Path):
    with Attempt(tmp_path, LAST_MOMENT) as attempt:
        assert attempt.run() == [78]
        assert attempt.status()["state"] == "FAILED"
        assert attempt.events("result")[0]["code"] == 78


def test_an_older_attempt_does_not_begin(tmp_path: Path):
    Starts(str(tmp_path / "run"), 2)
    with Attempt(tmp_path, "print('up')") as attempt:
        assert attempt.run() == [78]
        assert "attempt 1 does not start" in attempt.status()["reason"]
        assert not attempt.texts(0)
