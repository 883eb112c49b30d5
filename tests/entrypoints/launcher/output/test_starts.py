"""A start that a newer one has replaced on a shared folder does not succeed, whatever its script does."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher.errors import Refused
from launcher.output.starts import FOLDER, Starts

from tests.entrypoints.launching import Attempt

# Writes the model when it is told to go, or when it is asked to end.
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


def test_each_start_has_a_number_of_its_own(tmp_path: Path):
    first, again = Starts(str(tmp_path), 1), Starts(str(tmp_path), 1)
    assert again.replaced() == ""
    assert first.replaced() == "a later launcher of attempt 1 of this run has begun: this one is replaced and ends"
    second = Starts(str(tmp_path), 2)
    assert second.replaced() == ""
    assert again.replaced() == "attempt 2 of this run has begun: this one is replaced and ends"
    with pytest.raises(Refused, match="attempt 2 of this run has begun: attempt 1 does not begin any more"):
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
        assert status["reason"] == "attempt 2 of this run has begun: this one is replaced and ends"
        assert not attempt.left() and not list((tmp_path / "run" / "model").iterdir())
        assert newer.replaced() == ""


def test_a_start_that_is_replaced_while_it_ends_has_not_succeeded(tmp_path: Path):
    with Attempt(tmp_path, LAST_MOMENT) as attempt:
        assert attempt.run() == [78]
        assert attempt.status()["state"] == "FAILED"
        assert attempt.events("result")[0]["code"] == 78


def test_an_older_attempt_does_not_begin(tmp_path: Path):
    Starts(str(tmp_path / "run"), 2)
    with Attempt(tmp_path, "print('up')") as attempt:
        assert attempt.run() == [78]
        assert "attempt 1 does not begin any more" in attempt.status()["reason"]
        assert not attempt.texts(0)
