"""The watcher's processes with another environment, by a virtual clock: whose runs they have, when they die, hang and end."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cloudtrain.nodes.process import Process
from cloudtrain.runs.watching import watch_all, workers
from cloudtrain.runs.watching.watch import LEASE_S
from cloudtrain.runs.watching.watch_all import LINGER_S, ORPHANS_S, HomeWatcher
from cloudtrain.runs.watching.workers import HANGS_S
from tests.runs.world import Mail


class Child:
    """A process that does what the test says, and notes what it is told."""

    started: list[Child] = []

    def __init__(self, *_: object, **__: object) -> None:
        self.told: list[dict[str, Any]] = []
        self.killed = False
        self.stdin = io.BytesIO()
        self.started.append(self)

    def poll(self) -> int | None:
        return -9 if self.killed else None

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None:
        pass


class Quiet(workers.Worker):
    """It writes at once what its thread would write."""

    def send(self, message: dict[str, Any]) -> None:
        self._process.told.append(json.loads(json.dumps(message)))

    def _write(self) -> None:
        pass


@pytest.fixture
def watcher(submitter, job, memory, home, clock, monkeypatch) -> HomeWatcher:
    """A watcher with one run of another profile."""
    monkeypatch.setattr(Child, "started", [])
    monkeypatch.setattr(workers.subprocess, "Popen", Child)
    monkeypatch.setattr(watch_all, "Worker", Quiet)
    monkeypatch.setattr(watch_all, "Mailbox", Mail)
    monkeypatch.setattr(watch_all.environment, "patterns_of", lambda backend: ("AWS_*",))
    run = submitter.submit(job)
    watcher = HomeWatcher(home, {}, clock)
    message = {"do": "watch", "run": run.run_id, "environ": {"AWS_PROFILE": "other"}, "own": True, "sources": []}
    assert watcher.win([message])
    watcher.run_id = run.run_id  # type: ignore[attr-defined]
    return watcher


def live_for(watcher: HomeWatcher, seconds: float) -> bool:
    """Let the watcher do what is due for a while; False where it has ended."""
    end = watcher.store.clock.monotonic() + seconds
    while watcher.store.clock.monotonic() < end:
        if not watcher.step(0.0):
            return False
        watcher.store.clock.sleep(0.5)
    return True


def told(child: Child) -> list[str]:
    return [str(message["do"]) for message in child.told if "do" in message]


def test_a_run_is_told_to_its_process_until_that_has_taken_it(watcher):
    (child,) = Child.started
    assert child.told[0] == {"AWS_PROFILE": "other"} and told(child) == ["watch"]
    live_for(watcher, 3 * ORPHANS_S)
    assert len(told(child)) > 1
    assert watcher.store.lease(watcher.run_id, Process("another host", "boot", 1, "1"), LEASE_S)
    live_for(watcher, ORPHANS_S)
    number = len(told(child))
    live_for(watcher, 3 * ORPHANS_S)
    assert len(told(child)) == number and Child.started == [child]


def test_the_runs_of_a_process_that_died_are_given_to_another(watcher):
    (child,) = Child.started
    child.kill()
    live_for(watcher, 2 * ORPHANS_S)
    assert len(Child.started) == 2 and told(Child.started[1])[0] == "watch"


def test_a_process_that_hangs_is_killed_and_its_runs_are_given_to_another(watcher):
    (child,) = Child.started
    live_for(watcher, HANGS_S / 2)
    assert not child.killed
    live_for(watcher, HANGS_S)
    assert child.killed and len(Child.started) == 2


def test_a_process_is_let_go_when_its_runs_have_ended_and_so_is_the_watcher(watcher):
    (child,) = Child.started
    other = Process("another host", "boot", 1, "1")
    assert watcher.store.lease(watcher.run_id, other, LEASE_S)
    assert live_for(watcher, ORPHANS_S) and watcher._workers
    watcher.store.release(watcher.run_id, other)
    assert not live_for(watcher, 3 * (ORPHANS_S + LINGER_S))
    assert watcher._environs == {} and Child.started == [child]
