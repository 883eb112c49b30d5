"""Many runs watched by one process, in this process: what one platform does to the runs of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from cloudtrain.backends import registry
from cloudtrain.errors import Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs import asked, rates
from cloudtrain.runs.groups import GIVE_WAY_S, Entry, Group
from cloudtrain.runs.multiplex import Multiplexer
from cloudtrain.runs.run import Run
from cloudtrain.runs.spool import Spool
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
    logs_read: ClassVar[list[str]] = []
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
        self.logs_read.append(handle)
        return iter(())


class Draining(MemoryBackend):
    """A platform where the log of an attempt that has ended is complete when the test says so."""

    name = "draining"
    drained: ClassVar[threading.Event] = threading.Event()
    draining: ClassVar[list[str]] = []

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        if self.status(handle).state.final:
            self.draining.append(handle)
            self.drained.wait(60)
        return iter(())


@pytest.fixture
def submit(home, tmp_path, monkeypatch) -> Callable[[str], Run]:
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    for kind in (Hanging, Listing, Draining):
        registry.BUILT_IN[kind.name] = (f"{kind.__module__}:{kind.__name__}", None)
    for calls in (Listing.lists, Listing.singles, Listing.logs_read, Listing.made):
        calls.clear()
    Hanging.answers.clear()
    Draining.drained.clear()
    Draining.draining.clear()
    Listing.down = False
    (tmp_path / "train.py").write_text("print(1)\n")
    job = {"name": "x", "source": str(tmp_path), "entrypoint": "train.py"}
    yield lambda backend: Submitter(backend, watch=False).submit(job, new=True)
    Hanging.answers.set()
    Draining.drained.set()


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


def test_the_last_lines_of_many_ended_runs_delay_no_other(submit, home):
    ended, other = [submit("draining") for _ in range(8)], submit("draining")
    runs = Multiplexer(home, Process.here())
    for run in (*ended, other):
        runs.add(run.run_id, None)
    turn_until(runs, lambda: {run.record.status.state for run in (*ended, other)} == {State.RUNNING}, "their states")
    for run in ended:
        MemoryBackend.finish(run.attempts[-1].handle, State.FAILED, 1)
    turn_until(runs, lambda: len(set(Draining.draining)) == len(ended), "their ends")
    MemoryBackend.attempts[other.attempts[-1].handle].status = Status(State.STOPPING)
    turn_until(runs, lambda: other.record.status.state is State.STOPPING, "the state of another one")
    assert {run.record.status.state for run in ended} == {State.RUNNING}, "the log first"
    Draining.drained.set()
    turn_until(runs, lambda: {run.record.status.state for run in ended} == {State.FAILED}, "their ends")


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


def test_an_answer_for_many_is_noted_for_the_readers_of_each(submit, home):
    submitted = [submit("listing") for _ in range(3)]
    for run in submitted:
        MemoryBackend.attempts[run.attempts[-1].handle].status = Status(State.STARTING)
    runs = Multiplexer(home, Process.here())
    for run in submitted:
        runs.add(run.run_id, None)
    turn_until(runs, lambda: {run.record.status.state for run in submitted} == {State.STARTING}, "their states")
    for run in submitted:
        asked.expire(home, run.run_id)  # so that the next reader would ask
    Listing.lists.clear()
    turn_until(runs, lambda: len(Listing.lists) > 2, "some lists")
    assert all(asked.last(home, run.run_id).is_fresh(run.attempts[-1]) for run in submitted)


def test_logs_that_nobody_follows_are_read_at_the_platforms_rate(submit, home, monkeypatch):
    """A followed log does not wait for that, and the others give way to it."""
    monkeypatch.setattr(Listing, "logs_per_s", 0.001, raising=False)
    submitted = [submit("listing") for _ in range(6)]
    runs = Multiplexer(home, Process.here())
    for run in submitted:
        runs.add(run.run_id, None)
    turn_until(runs, lambda: {run.record.status.state for run in submitted} == {State.RUNNING}, "their states")
    Listing.lists.clear()
    turn_until(runs, lambda: len(Listing.lists) > 2, "some lists")
    Listing.logs_read.clear()
    Listing.lists.clear()
    turn_until(runs, lambda: len(Listing.lists) > 4, "some lists")
    assert Listing.logs_read == [], "what may be read was read"
    followed = submitted[3]
    turn_until(runs, lambda: Spool(home, followed.run_id, 1).follow() or Listing.logs_read, "its log")
    assert set(Listing.logs_read) == {followed.attempts[-1].handle}


def test_pauses_grow_where_looks_take_their_share_or_the_machine_is_busy():
    share = rates.ProcessorShare()
    share.adapt(rates.SHARE / 2, 0.0)
    assert share.stretch == 1.0
    share.adapt(rates.SHARE * 1.5, 0.0)
    assert share.stretch == pytest.approx(1.5)
    share.adapt(0.0, rates.LAG_S * 10)
    assert share.stretch == pytest.approx(3.0), "twice as long at once"
    for _ in range(10):
        share.adapt(1.0, 0.0)
    assert share.stretch == rates.STRETCH_MAX
    for _ in range(10):
        share.adapt(0.0, 0.0)
    assert share.stretch == 1.0


def test_routine_reads_of_logs_give_way_to_many_others_for_a_moment_only(tmp_path):
    group = Group("all", Listing({}, tmp_path), rates.ProcessorShare())
    for number in range(1000):
        entry = Entry(f"run-{number}", None)
        entry.given = Status(State.RUNNING)
        group.queue(entry, first=True)
        assert group.take_waiting() is entry
    group.queue(Entry("routine", None))
    next_at = group.next_at()
    assert next_at is not None and next_at - time.monotonic() < GIVE_WAY_S + 1
