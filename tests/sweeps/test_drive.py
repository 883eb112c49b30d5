"""The process of a sweep is started once, until it had its time to take its lease; one that fails is not started at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloudtrain.errors import StoreError
from cloudtrain.history.trials import SweepHistory
from cloudtrain.runs.sending import handover
from cloudtrain.sweeps.drive import Driver
from cloudtrain.sweeps.file import read
from cloudtrain.sweeps.send import specification
from tests.sweeps.conftest import SCRIPT, read_yaml


def test_no_second_process_is_started_before_the_first_could_take_its_lease(home: Path, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(handover, "detach", lambda command, **_: started.append(command))
    home.mkdir(exist_ok=True)
    assert [handover.drive(home, name, {}) for name in ("a", "b", "a")] == [True, True, False]
    os.utime(handover.starting(home, "a"), (0, 0))
    assert handover.drive(home, "a", {}) and [command[-1] for command in started] == ["a", "b", "a"]


def test_after_a_failure_the_next_process_is_started_later(home: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    text = "program: train.py\nmethod: grid\nparameters: {lr: {values: [0.1]}}\n"
    document = read_yaml(text)[0].value
    SweepHistory(home).add("s", "s", specification(home, document, read(document, tmp_path)))
    driver = Driver(home, "s")

    def fail() -> bool:
        assert not handover.starting(home, "s").exists(), "it has its lease"
        raise StoreError("the disk is full")

    monkeypatch.setattr(driver, "look", fail)
    handover.starting(home, "s").parent.mkdir(exist_ok=True)
    handover.starting(home, "s").touch()
    with pytest.raises(StoreError):
        driver.run()
    monkeypatch.setattr(handover, "detach", lambda *_, **__: pytest.fail("it was started"))
    assert not handover.drive(home, "s", {})
