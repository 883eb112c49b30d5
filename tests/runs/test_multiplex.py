"""Many runs watched by one process, in this process: what one platform does to the runs of another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from cloudtrain.backends import registry
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.history.spool import Spool, expire_contact, last_contact
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching import groups, scheduler
from cloudtrain.runs.watching import watch as watch_module
from cloudtrain.runs.watching.groups import GIVE_WAY_S, SENDERS, THREADS, Entry, Group
from cloudtrain.runs.watching.scheduler import Multiplexer
from cloudtrain.runs.watching.watch import Look, Watcher
from cloudtrain.testing.clock import VirtualClock
from cloudtrain.testing.memory import MemoryBackend

STUCK: list[threading.Event] = []  # of each call that waits for the test


def hold_until(event: threading.Event) -> None:
    STUCK.append(event)
    event.wait(60)
    STUCK.remove(event)


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

    def __init__(self, options: Mapping[str, object], workdir: Path, clock: Clock = SYSTEM) -> None:
        super().__init__(options, workdir, clock)
        self.made.append(self)

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        self.lists.append(len(handles))
        if Listing.down:
            raise Unreachable("nobody answers")
        return {handle: MemoryBackend.status(self, handle) for handle in handles}

    def status(self, handle: str) -> Status:
        self.singles.append(handle)
        if Listing.down:
            raise Unreachable("nobody answers")
        return super().status(handle)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        self.logs_read.append(handle)
        return iter(())


class Hanging(Listing):
    """A platform that answers no call of one kind until the test says so."""

    name = "hanging"
    group = "hanging"
    poll_s = 0.05
    hangs: ClassVar[str] = ""  # the kind of call
    held: ClassVar[list[str]] = []  # calls that wait
    answers: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def hold(cls, call: str) -> None:
        if call == cls.hangs:
            cls.held.append(call)
            hold_until(cls.answers)

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        self.hold("statuses")
        return super().statuses(handles)

    def status(self, handle: str) -> Status:
        self.hold("status")
        return super().status(handle)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        self.hold("logs")
        return super().logs(handle, follow=follow, after=after)


class Marked(Listing):
    """A platform that may be asked once a day, and whose files are here."""

    name = "marked"
    group = "marked"
    poll_s = 86400.0
    has_marks = True

    def marks(self, handles: Sequence[str]) -> dict[str, object]:
        return {handle: self.attempts[handle].status.state for handle in handles}


class Ended(Marked):
    """The same, whose files have the final status too, and which may be called twice."""

    name = "ended"
    group = "ended"
    calls_per_s = 1e-9

    def ended(self, handles: Sequence[str]) -> dict[str, Status]:
        found = {handle: MemoryBackend.status(self, handle) for handle in handles}
        return {handle: status for handle, status in found.items() if status.state.final}


class Draining(MemoryBackend):
    """A platform where the log of an attempt that has ended is complete when the test says so."""

    name = "draining"
    drained: ClassVar[threading.Event] = threading.Event()
    draining: ClassVar[list[str]] = []

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        if self.status(handle).state.final:
            self.draining.append(handle)
            hold_until(self.drained)
        return iter(())


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def submit(home, tmp_path, monkeypatch, clock) -> Callable[[str], Run]:
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    MemoryBackend.install()
    for kind in (Hanging, Listing, Draining, Marked, Ended):
        registry.BUILT_IN[kind.name] = (f"{kind.__module__}:{kind.__name__}", None)
    for calls in (Listing.lists, Listing.singles, Listing.logs_read, Listing.made, Hanging.held):
        calls.clear()
    Hanging.answers.clear()
    Hanging.hangs = ""
    Draining.drained.clear()
    Draining.draining.clear()
    Listing.down = False
    (tmp_path / "train.py").write_text("print(1)\n")
    job = {"name": "x", "source": str(tmp_path), "entrypoint": "train.py", "retry": {"max_attempts": 2}}
    yield lambda backend: Submitter(backend, watch=False, clock=clock).submit(job, new=True)
    Hanging.answers.set()
    Draining.drained.set()


def turn_until(runs: Multiplexer, condition: Callable[[], object], what: str) -> None:
    """Let the clock go on to what is due next, whenever no thread works on what was due before."""
    for _ in range(60_000):  # two minutes of threads that work, or years of pauses
        runs.turn(0.0)
        if condition():
            return
        asked = sum(group.asking + group.reading_marks for group in runs._groups.values())
        begun = asked + sum(entry.busy for entry in runs.runs.values())
        if begun - sum(group.senders._work_queue.qsize() for group in runs._groups.values()) > len(STUCK):
            time.sleep(0.002)
        else:
            runs.store.clock.sleep(max(runs._next_s(), 0.001))
    raise AssertionError(f"{what} did not come")


def set_states(submitted: Sequence[Run], state: State) -> None:
    for run in submitted:
        MemoryBackend.attempts[run.attempts[-1].handle].status = Status(state)


def states(submitted: Sequence[Run]) -> set[State]:
    return {run.attempts[-1].status.state for run in submitted}


@pytest.mark.parametrize(
    ("call", "at_once"), [("statuses", 1), ("status", THREADS), ("logs", THREADS), ("send", SENDERS)]
)
def test_a_platform_that_hangs_delays_no_other(submit, home, clock, monkeypatch, call, at_once):
    """While all calls of one kind are held, the runs of other platforms go through all states, their next attempt's too."""

    def send(home: Path, run_id: str, me: Process, *_: object) -> int:
        """Send an attempt as the watcher's child does, which would not see the platforms of this process."""
        store = Store(home, clock)
        if store.find(run_id).backend == "hanging":
            Hanging.hold("send")
        looks = Watcher(store, run_id, me)
        while looks.look() is Look.MOVED and store.attempts(run_id)[-1].handle is None:
            pass
        return 0

    monkeypatch.setattr(scheduler, "run_sender", send)
    monkeypatch.setattr(Listing, "poll_s", 0.05)
    hanging = [submit("hanging") for _ in range(3 * THREADS)]
    others = [submit(backend) for backend in ("memory", "listing", "listing")]
    runs = Multiplexer(home, Process.here(), clock=clock)
    for run in (*hanging, *others):
        runs.add(run.run_id, None)
    turn_until(runs, lambda: states((*hanging, *others)) == {State.RUNNING}, "their states")
    Hanging.hangs = call
    if call == "send":
        set_states(hanging, State.PREEMPTED)
    for run in hanging if call in ("status", "logs") else ():
        runs.look_now(run.run_id)
    turn_until(runs, lambda: len(Hanging.held) >= at_once, "calls that wait")
    for state in (State.STOPPING, State.RUNNING, State.STOPPING):
        set_states(others, state)
        turn_until(runs, lambda state=state: states(others) == {state}, "the states of the others")
    set_states(others, State.PREEMPTED)
    turn_until(runs, lambda: all(len(run.attempts) == 2 for run in others), "their next attempts")
    turn_until(runs, lambda: states(others) == {State.RUNNING}, "and that these run")
    assert len(Hanging.held) == at_once, "they wait"
    Hanging.answers.set()
    number = 2 if call == "send" else 1
    turn_until(runs, lambda: {len(run.attempts) for run in hanging} == {number}, "the attempts of those that waited")
    turn_until(runs, lambda: states(hanging) == {State.RUNNING}, "and that these run")
    set_states((*hanging, *others), State.SUCCEEDED)
    turn_until(runs, lambda: not runs.runs, "all ends")
    assert states((*hanging, *others)) == {State.SUCCEEDED}


def test_the_last_lines_of_many_ended_runs_delay_no_other(submit, home, clock):
    ended, other = [submit("draining") for _ in range(8)], submit("draining")
    runs = Multiplexer(home, Process.here(), clock=clock)
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


def test_many_are_asked_for_in_one_call(submit, home, clock):
    submitted = [submit("listing") for _ in range(10)]
    runs = Multiplexer(home, Process.here(), clock=clock)
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


def running(submit, home, clock, target: str) -> tuple[list[Run], Multiplexer]:
    """Return ten runs of a target that are RUNNING, and who watches them."""
    submitted = [submit(target) for _ in range(10)]
    runs = Multiplexer(home, Process.here(), clock=clock)
    for run in submitted:
        runs.add(run.run_id, None)
    turn_until(runs, lambda: {run.record.status.state for run in submitted} == {State.RUNNING}, "their states")
    return submitted, runs


def seconds_to_end(submitted: list[Run], runs: Multiplexer, clock) -> float:
    """End all runs, between two reads of their files, and return the seconds until that is stored."""
    turn_until(runs, lambda: not any(group.reading_marks for group in runs._groups.values()), "a moment of rest")
    Listing.singles.clear()
    Listing.lists.clear()
    for run in submitted:
        MemoryBackend.finish(run.attempts[-1].handle, State.SUCCEEDED, 0)
    began = clock.monotonic()
    turn_until(runs, lambda: not runs.runs, "their ends")
    return clock.monotonic() - began


def test_ends_that_files_show_are_asked_for_at_once_and_together(submit, home, clock):
    submitted, runs = running(submit, home, clock, "marked")
    later = clock.monotonic() + watch_module.OLD_S * 2
    turn_until(runs, lambda: clock.monotonic() > later, "a long pause")
    assert seconds_to_end(submitted, runs, clock) < 2.0
    assert len(Listing.lists) <= 2 and not Listing.singles


def test_ends_that_files_have_need_no_call(submit, home, clock):
    """Runs that wait for a call do not keep an end from being stored."""
    submitted, runs = running(submit, home, clock, "ended")
    for run in submitted:
        runs.look_now(run.run_id)
    assert seconds_to_end(submitted, runs, clock) < 2.0
    assert len(Listing.singles) + len(Listing.lists) <= 2


def test_the_files_of_an_attempt_do_not_end_the_next_one(submit, home, clock, monkeypatch):
    """The batch script writes after the launcher; what it wrote is read when the next attempt has just been sent."""

    class Late(Multiplexer):
        def _sent(self, entry: Entry, code: int) -> None:
            super()._sent(entry, code)
            assert entry.group and entry.group.asks and entry.handle == first
            self._marks_read(entry.group, [entry], {first: "more"}, entry.group.asks.ended([first]))

    def send(home: Path, run_id: str, me: Process, *_: object) -> int:
        store = Store(home, clock)
        looks = Watcher(store, run_id, me)
        while looks.look() is Look.MOVED and store.attempts(run_id)[-1].handle is None:
            pass
        return 0

    monkeypatch.setattr(scheduler, "run_sender", send)
    monkeypatch.setattr(Ended, "calls_per_s", 1000.0)
    run = submit("ended")
    first = run.attempts[-1].handle
    runs = Late(home, Process.here(), clock=clock)
    runs.add(run.run_id, None)
    turn_until(runs, lambda: run.record.status.state is State.RUNNING, "its state")
    MemoryBackend.attempts[first].status = Status(State.PREEMPTED)
    turn_until(
        runs, lambda: len(run.attempts) == 2 and run.attempts[-1].status.state is not State.QUEUED, "a look at the next"
    )
    assert [attempt.status.state for attempt in run.attempts] == [State.PREEMPTED, State.RUNNING]
    MemoryBackend.finish(run.attempts[-1].handle, State.SUCCEEDED, 0)
    turn_until(runs, lambda: not runs.runs, "its end")
    assert run.record.status.state is State.SUCCEEDED


def test_a_platform_that_is_not_reached_keeps_its_client_and_is_asked_rarely(submit, home, clock):
    submitted = [submit("listing") for _ in range(2)]
    runs = Multiplexer(home, Process.here(), clock=clock)
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


def test_an_answer_for_many_is_noted_for_the_readers_of_each(submit, home, clock):
    submitted = [submit("listing") for _ in range(3)]
    for run in submitted:
        MemoryBackend.attempts[run.attempts[-1].handle].status = Status(State.STARTING)
    runs = Multiplexer(home, Process.here(), clock=clock)
    for run in submitted:
        runs.add(run.run_id, None)
    turn_until(runs, lambda: {run.record.status.state for run in submitted} == {State.STARTING}, "their states")
    for run in submitted:
        expire_contact(home, run.run_id)  # so that the next reader would ask
    Listing.lists.clear()
    turn_until(runs, lambda: len(Listing.lists) > 2, "some lists")
    assert all(last_contact(home, run.run_id, clock).is_fresh(run.attempts[-1]) for run in submitted)


def test_logs_that_nobody_follows_are_read_at_the_platforms_rate(submit, home, clock, monkeypatch):
    """A followed log does not wait for that, and the others give way to it."""
    monkeypatch.setattr(Listing, "logs_per_s", 0.001, raising=False)
    submitted = [submit("listing") for _ in range(6)]
    runs = Multiplexer(home, Process.here(), clock=clock)
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
    turn_until(runs, lambda: Spool(home, followed.run_id, 1, clock).follow() or Listing.logs_read, "its log")
    assert set(Listing.logs_read) == {followed.attempts[-1].handle}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_log_that_is_followed_waits_for_no_state(submit, home, clock, monkeypatch, hangs, count):
    """The scheduler hangs, or is denied, and is not asked again before the test ends: its runs' logs are read on."""
    submitted = [submit("hanging") for _ in range(count)]
    followed = submitted[0]
    runs = Multiplexer(home, Process.here(), clock=clock)
    for run in submitted:
        runs.add(run.run_id, None)
    turn_until(runs, lambda: states(submitted) == {State.RUNNING}, "their states")
    if hangs:
        Hanging.hangs = "status" if count == 1 else "statuses"
        turn_until(runs, lambda: Hanging.held, "the question that hangs")
    else:
        monkeypatch.setattr(watch_module, "OUTAGE_S", 1e6)
        monkeypatch.setattr(watch_module, "OUTAGE_MAX_S", 1e6)
        Listing.down = True
        turn_until(runs, lambda: (a := last_contact(home, followed.run_id)) and a.error, "the question that is denied")
    Listing.logs_read.clear()
    handle = followed.attempts[-1].handle
    read_five = lambda: Spool(home, followed.run_id, 1, clock).follow() or Listing.logs_read.count(handle) >= 5  # noqa: E731
    turn_until(runs, read_five, "its log")
    assert states(submitted) == {State.RUNNING}
    if hangs:
        assert len(Hanging.held) == 1, "one question waits"
        Hanging.answers.set()
        set_states(submitted, State.SUCCEEDED)
        turn_until(runs, lambda: not runs.runs, "their ends")


def test_pauses_grow_where_looks_take_their_share_or_the_machine_is_busy():
    share = groups.ProcessorShare()
    share.adapt(groups.SHARE / 2, 0.0)
    assert share.stretch == 1.0
    share.adapt(groups.SHARE * 1.5, 0.0)
    assert share.stretch == pytest.approx(1.5)
    share.adapt(0.0, groups.LAG_S * 10)
    assert share.stretch == pytest.approx(3.0), "twice as long at once"
    for _ in range(10):
        share.adapt(1.0, 0.0)
    assert share.stretch == groups.STRETCH_MAX
    for _ in range(10):
        share.adapt(0.0, 0.0)
    assert share.stretch == 1.0


def test_routine_reads_of_logs_give_way_to_many_others_for_a_moment_only(tmp_path):
    clock = VirtualClock()
    group = Group("all", Listing({}, tmp_path), groups.ProcessorShare(clock), clock)
    for number in range(1000):
        entry = Entry(f"run-{number}", None, clock)
        entry.given = Status(State.RUNNING)
        group.queue(entry, first=True)
        assert group.take_waiting() is entry
    group.queue(Entry("routine", None, clock))
    next_at = group.next_at()
    assert next_at is not None and next_at - clock.monotonic() < GIVE_WAY_S + 1
