"""A platform that fails as a test says, and what tests of submissions do with it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cloudtrain.errors import Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.testing.memory import MemoryBackend


class Platform(MemoryBackend):
    """A platform that fails as the test says: `fails` holds what the next calls raise, by the name of the call."""

    name = "platform"
    fails: dict[str, list[Exception]] = {}
    after_commit: bool = False  # whether a submission that fails has been carried out
    calls: list[str] = []

    def _call(self, what: str) -> None:
        self._clock.now()  # as those do whose tokens end: one that was made without a clock fails
        self.calls.append(what)
        if self.fails.get(what):
            raise self.fails[what].pop(0)

    def submit(self, plan, bundle):
        if self.after_commit:
            super().submit(plan, bundle)
        self._call("submit")
        return super().submit(plan, bundle)

    def find(self, attempt_id):
        self._call("find")
        return super().find(attempt_id)

    def cancel(self, handle):
        self._call("cancel")
        super().cancel(handle)

    def labels(self, handle):
        return dict(self.attempts[handle].plan.job["labels"])


LOST = Unreachable("no answer")


def look(run: Run, times: int = 1) -> None:
    """What the watcher does."""
    for _ in range(times):
        Watcher(run.store, run.run_id, complain=lambda _: None).refresh()


def quietly(run: Run) -> State:
    """What a reader does."""
    return run.refresh(lambda _: None).state


def dead() -> Process:
    return replace(Process.here(), started="0")


def interrupted(submitter: Submitter, job: Job, *, age: timedelta = timedelta(), key: str | None = None) -> str:
    """Leave what a submit leaves that was killed before it sent anything."""
    resolved = submitter.resolve(job)
    plan = submitter.plan_of(resolved, submitter.package(resolved), key)
    assert submitter.store.intend(plan, identity=plan.identity, owner=dead(), key=key)
    made = (datetime.now(UTC) - age).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    with submitter.store.database.write() as db:
        db.execute("UPDATE attempts SET created_at = ? WHERE attempt_id = ?", (made, plan.attempt_id))
    return plan.run_id
