"""The process of a sweep is started once, until it had its time to take its lease; one that fails is not started at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloudtrain.backends import registry
from cloudtrain.errors import StoreError
from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.runs.sending import handover
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.sweeps.drive import Driver
from cloudtrain.sweeps.file import read
from cloudtrain.sweeps.send import specification
from cloudtrain.testing.memory import MemoryBackend
from tests.sweeps.conftest import SCRIPT, read_yaml


def test_no_second_process_is_started_before_the_first_could_take_its_lease(home: Path, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(handover, "detach", lambda command, **_: started.append(command))
    home.mkdir(exist_ok=True)
    assert [handover.drive(home, name, {}) for name in ("a", "b", "a")] == [True, True, False]
    os.utime(handover.starting(home, "a"), (0, 0))
    assert handover.drive(home, "a", {}) and [command[-1] for command in started] == ["a", "b", "a"]


def test_a_trial_has_its_result_when_its_log_is_read_to_the_end(home: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr(handover, "start", lambda *_, **__: None)
    MemoryBackend.install()
    (tmp_path / "train.py").write_text(SCRIPT)
    text = "program: train.py\ntarget: memory\nmetric: {name: loss}\nmethod: grid\nparameters: {lr: {values: [0.1]}}\n"
    document = read_yaml(text)[0].value
    history = SweepHistory(home)
    history.add("s", "s", specification(home, document, read(document, tmp_path)))
    driver = Driver(home, "s")
    driver.look()
    (trial,) = history.trials("s")
    store, handle = Store(home), f"{trial.run_id}-a1"
    MemoryBackend.finish(handle)
    store.mark_unread(trial.run_id)
    store.record(handle, status=Status(State.SUCCEEDED, 0))
    store.set_status(trial.run_id, Status(State.SUCCEEDED, 0))
    driver.look()
    assert not history.trials("s")[0].ended
    MemoryBackend.say(handle, "{'loss': 0.25}")
    Watcher(store, trial.run_id).look()
    driver.look()
    assert [(trial.ended, trial.result) for trial in history.trials("s")] == [(True, [0.25])]


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
