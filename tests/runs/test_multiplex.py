"""Many runs watched by one process, in this process: what one platform does to the runs of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from cloudtrain.backends import registry
from cloudtrain.errors import Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs import rates
from cloudtrain.runs.multiplex import Multiplexer
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import wait_for


class Hanging(MemoryBackend):
    """A platform that does not answer until the test says so."""

    name = "hanging"
    answers: ClassVar[threading.Event] = threading.Event()

    def status(self, handle: str) -> Status:
        self.answers.wait(60)
        return super().status(handle)


class Listing(MemoryBackend):
    """A platform that lists all attempts in one call."""

    name = "listing"
    poll_s = 0.5
    follow_s = 0.0  # it is shared, and its log is here
    group = "all"
    calls_per_s = 1000.0
    lists: ClassVar[list[int]] = []
    singles: ClassVar[list[str]] = []
    made: ClassVar[list[MemoryBackend]] = []
    down: ClassVar[bool] = False

    def __init__(self, options: Mapping[str, object], workdir: Path) -> None:
        super().__init__(options, workdir)
        self.made.append(self)

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        self.lists.append(len(handles))
        if Listing.down:
            raise Unreachable("nobody answers")
        return {handle: MemoryBackend.status(self, handle) for handle in handles}

    def status(self, handle: str) -> Status:
        self.singles.append(handle)
        return super().status(handle)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        return iter(())


@pytest.fixture
def submit(home, tmp_path, monkeypatch) -> Callable[[str], Run]:
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    for kind in (Hanging, Listing):
        registry.BUILT_IN[kind.name] = (f"{kind.__module__}:{kind.__name__}", None)
    for calls in (Listing.lists, Listing.singles, Listing.made):
        calls.clear()
    Hanging.answers.clear()
    Listing.down = False
    (tmp_path / "train.py").write_text("print(1)\n")
    job = {"name": "x", "source": str(tmp_path), "entrypoint": "train.py"}
    yield lambda backend: Submitter(backend, watch=False).submit(job, new=True)
    Hanging.answers.set()


def turn_until(runs: Multiplexer, condition: Callable[[], object], what: str) -> None:
    def turned() -> object:
        runs.turn(0.05)
        return condition()

    wait_for(turned, what)


def test_a_platform_that_hangs_delays_no_other(submit, home):
    hanging = [submit("hanging") for _ in range(12)]  # more than the threads of one platform
    quick = submit("memory")
    ended: list[str] = []
    runs = Multiplexer(home, Process.here(), ended.append)
    for run in (*hanging, quick):
        runs.add(run.run_id, None)
    turn_until(runs, lambda: quick.record.status.state is State.RUNNING, "its state")
    MemoryBackend.finish(quick.attempts[-1].handle, State.SUCCEEDED, 0)
    turn_until(runs, lambda: ended == [quick.run_id], "its end")
    assert {run.record.status.state for run in hanging} == {State.QUEUED}, "these wait"
    Hanging.answers.set()
    turn_until(runs, lambda: {run.record.status.state for run in hanging} == {State.RUNNING}, "the others")


def test_many_are_asked_for_in_one_call(submit, home):
    submitted = [submit("listing") for _ in range(10)]
    runs = Multiplexer(home, Process.here())
    for run in submitted:
        runs.add(run.run_id, None)
        runs.look_now(run.run_id)
    turn_until(runs, lambda: {run.record.status.state for run in submitted} == {State.RUNNING}, "their states")
    Listing.singles.clear()
    Listing.lists.clear()
    for run in submitted:
        MemoryBackend.finish(run.attempts[-1].handle, State.SUCCEEDED, 0)
    turn_until(runs, lambda: not runs.runs, "their ends")
    assert len(Listing.lists) <= 4 and len(Listing.singles) <= 2
    assert {run.record.status.state for run in submitted} == {State.SUCCEEDED}


def test_a_platform_that_is_not_reached_keeps_its_client_and_is_asked_rarely(submit, home, monkeypatch):
    monkeypatch.setattr(rates, "OUTAGE_S", 0.01)
    submitted = [submit("listing") for _ in range(2)]
    runs = Multiplexer(home, Process.here())
    for run in submitted:
        runs.add(run.run_id, None)
    turn_until(runs, lambda: {run.record.status.state for run in submitted} == {State.RUNNING}, "their states")
    made = len(Listing.made)
    Listing.down = True
    Listing.lists.clear()
    turn_until(runs, lambda: len(Listing.lists) > 4, "some tries")
    assert len(Listing.made) == made, "no new client"
    Listing.down = False
    for run in submitted:
        MemoryBackend.finish(run.attempts[-1].handle, State.SUCCEEDED, 0)
    turn_until(runs, lambda: not runs.runs, "their ends")
    assert Store(home).find(submitted[0].run_id).status.state is State.SUCCEEDED
