"""The process of a sweep is started once, until it had its time to take its lease; one that fails is not started at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest, StoreError
from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.runs.sending import handover
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.sweeps.drive import Driver
from cloudtrain.sweeps.file import read
from cloudtrain.sweeps.send import specification
from cloudtrain.sweeps.sweep import Sweep
from cloudtrain.testing.memory import MemoryBackend
from tests.functions.conftest import scaled
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


@pytest.fixture
def group(home: Path, monkeypatch):
    """A group of four calls on a platform that takes three in one request, and how to drive it."""
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr(handover, "start", lambda *_, **__: None)
    monkeypatch.setattr(Sweep, "ensure_driven", lambda self: None)
    MemoryBackend.install()
    expected: list[list[str]] = []
    monkeypatch.setattr(MemoryBackend, "most_together", lambda self, plan: 3)
    monkeypatch.setattr(
        MemoryBackend, "expect", lambda self, plans, at_once: expected.append([each.attempt_id for each in plans])
    )
    made = cloudtrain.function(scaled, target="memory", output="/shared/runs").map([1, 2, 3, 4], max_parallel=2)
    return made, Driver(home, made.sweep_id), expected


def end(group: Sweep, count: int) -> None:
    """Let the first calls end."""
    for trial in group.trials[:count]:
        if trial.run_id and not trial.ended:
            MemoryBackend.finish(f"{trial.run_id}-a1")
            Store(group.home).set_status(trial.run_id, Status(State.SUCCEEDED, 0))


def test_calls_are_sent_together_where_the_platform_takes_them(group, home: Path):
    made, driver, expected = group
    assert driver.look() and not any(trial.run_id for trial in made.trials), "stored before anything is sent"
    assert driver.look() and all(trial.run_id for trial in made.trials)
    assert expected == [[f"{trial.run_id}-a1" for trial in made.trials]] and len(made.trials) == 3
    end(made, 2)
    driver.look()
    assert not driver.look() and len(made.trials) == 3, "the platform holds one yet, and the fourth waits for its end"
    end(made, 3)
    driver.look()
    assert driver.look() and [trial.params["call"] for trial in made.trials] == [0, 1, 2, 3]


def test_a_call_is_planned_as_if_it_were_the_first(group):
    made, driver, _ = group
    trials, calls = driver.trials, [(number, {"call": number - 1}) for number in (1, 2, 3)]
    planned = [trials._plan(number, params, "memory") for number, params in calls]
    for (number, params), plan in zip(calls, planned, strict=True):
        trials._first.clear()
        assert trials._plan(number, params, "memory") == plan


def test_a_driver_that_was_killed_sends_what_is_not_sent_together(group, home: Path):
    made, driver, expected = group
    driver.look()
    driver._submit(made.trials[0])
    again = Driver(home, made.sweep_id)
    again.look()
    assert expected[-1] == [f"{trial.run_id}-a1" for trial in made.trials[1:]]
    assert len({trial.run_id for trial in made.trials}) == 3


def test_a_call_that_is_refused_after_the_others_were_sent_is_stopped(group, home: Path, monkeypatch):
    made, driver, _ = group
    stopped: list[str] = []
    monkeypatch.setattr(MemoryBackend, "discard", lambda self, attempt_id: stopped.append(attempt_id))
    driver.look()
    second = driver.trials.run_id(made.trials[1])
    preflight = MemoryBackend.preflight

    def refuse(self, plan):
        if plan.run_id == second:
            raise BadRequest("over the budget")
        preflight(self, plan)

    monkeypatch.setattr(MemoryBackend, "preflight", refuse)
    driver.look()
    assert stopped == [f"{second}-a1"]
    assert [bool(trial.run_id) for trial in made.trials] == [True, False, True]
