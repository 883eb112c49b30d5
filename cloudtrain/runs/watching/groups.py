"""The runs that a watcher asks for in one call, when each is due, and what a look at one needs."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import State, Status
from cloudtrain.runs.watching.watch import Pace, Watcher, outage_pause_s

THREADS = 4  # of one group, beside the one that asks for states
ENDS = 16  # more, for attempts that have ended: where a launcher was killed, late lines of its log are waited for
SENDERS = 4  # processes that send an attempt of one group, at once
SOON_S = 0.5  # before a look at a run of which nothing is known yet
GIVE_WAY_S = 10.0  # how long routine reads of logs give way to others, at most
UNREAD_S = 60.0  # the longest time between two looks into the history at a run that logs nothing yet
STRETCHED_S = 20.0  # the longest that a pause is made because this process takes its share of a processor
# Of a processor that looks may take together; above it pauses grow, this much at the most.
SHARE, STRETCH_MAX = 0.10, 20.0
LAG_S = 0.5  # that an answer may wait for the thread that decides: on a machine that is busy, looks have to be fewer
_LOGS = frozenset({State.RUNNING, State.STOPPING})
_NUMBERS = itertools.count()


class Budget:
    """Calls that may be made of one platform: so many a second, and as many at once after a quiet second."""

    def __init__(self, calls_per_s: float, clock: Clock = SYSTEM) -> None:
        self.calls_per_s, self._clock = calls_per_s, clock
        self._most = max(calls_per_s, 2.0)
        self._left = self._most
        self._at = self._clock.monotonic()

    def wait_s(self) -> float:
        """Return how long to wait until a call may be made, in seconds."""
        moment = self._clock.monotonic()
        self._left = min(self._most, self._left + (moment - self._at) * self.calls_per_s)
        self._at = moment
        missing = 1 - self._left
        return missing / self.calls_per_s if missing > 1e-9 else 0.0  # a wait that no clock can show would never end

    def take(self, calls: int) -> None:
        """Count calls; more than are left are paid by a longer wait."""
        self._left -= calls


class ProcessorShare:
    """How much longer pauses are, so that looks take at most SHARE of a processor, and less where others leave less."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.stretch, self._clock = 1.0, clock
        self._measured = (self._clock.monotonic(), time.process_time())
        self._lag_s = 0.0

    def note_lag(self, lag_s: float) -> None:
        """Note how long something waited for the thread that decides."""
        self._lag_s = max(self._lag_s, lag_s)

    def measure(self) -> None:
        """Adapt the pauses once a second."""
        moment, used = self._clock.monotonic(), time.process_time()
        if moment - self._measured[0] >= 1:
            self.adapt((used - self._measured[1]) / (moment - self._measured[0]), self._lag_s)
            self._measured, self._lag_s = (moment, used), 0.0

    def adapt(self, share: float, lag_s: float) -> None:
        """Adapt the pauses to the share of a processor that was used, and to the longest lag meanwhile."""
        change = min(max(share / SHARE, lag_s / LAG_S, 0.5), 2.0)
        self.stretch = min(max(1.0, self.stretch * change), STRETCH_MAX)


class Entry:
    """A run that is watched. Only the thread that decides changes it, except `watch` while it is busy."""

    def __init__(self, run_id: str, environ: Mapping[str, str] | None, clock: Clock = SYSTEM) -> None:
        self.run_id, self.environ, self._clock = run_id, environ, clock
        self.group: Group | None = None
        self.watch: Watcher | None = None
        self.attempt_id = ""
        self.handle: str | None = None
        self.wanted = self._clock.monotonic()  # since when its lease is wanted
        self.leased = False
        self.busy = False  # a thread looks at it
        self.ending = False  # and has seen that its attempt has ended
        self.queued = False  # it waits for a thread
        self.again = False  # look at it once more at once
        self.log_only = False  # somebody follows its log, and its state is not due
        self.cancelled = False  # a request to cancel was seen
        self.seen: Status | None = None  # in the store
        self.given: Status | None = None  # from the group's last call
        self.arrived: Status | None = None  # the same, while a thread looked at the run
        self.pace: Pace | None = None  # known after the first look
        self.mark: object = None  # as of Backend.marks
        self.looked = -UNREAD_S
        self.pause_s = self.due = 0.0
        self.nodes = 1
        self.failures = 0

    def needs_look(self) -> bool:
        """Return whether more than the platform's status is due: it has changed, or there may be new log lines."""
        given, seen = self.given, self.seen
        if given is None or seen is None or given.state in _LOGS or given.state.final or self.again:
            return True
        same = (given.state, given.reason, given.started_at) == (seen.state, seen.reason, seen.started_at)
        return not same or self._clock.monotonic() - self.looked > UNREAD_S


class InPlace(Executor):
    """Does what it is given before it returns, in the caller's thread."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        call(*args, **named)
        return Future()


class Group:
    """Runs of one account, cluster or host: their threads, their limit of calls, and when each is due."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        share: ProcessorShare,
        clock: Clock = SYSTEM,
        pool: Callable[[int, str], Executor] = ThreadPoolExecutor,
    ) -> None:
        self.name, self._share, self._clock = name, share, clock
        self.renew(backend)
        self.budget = Budget(backend.calls_per_s, clock)
        self.pool = pool(THREADS + ENDS, name)
        self.lane = pool(1, name)  # for the call that asks for all states
        self.senders = pool(SENDERS, name)
        self._logs_per_s = backend.logs_per_s
        self._log_budget = Budget(self._logs_per_s, clock)
        self._urgent: deque[Entry] = deque()  # wait for a thread and the budget: something changed, or somebody follows
        self._waiting: deque[Entry] = deque()  # for new lines of the log
        self.running = self.ending = 0  # looks that are under way
        self.asking = self.reading_marks = False
        self._asked_last = False  # the last call that the budget allowed asked for many states, not for one
        self._heap: list[tuple[float, int, Entry]] = []

    def renew(self, backend: Backend) -> None:
        """Ask through another object from now on."""
        self.asks = backend if backend.group else None

    # -- when -----------------------------------------------------------------------------------------------------------

    def schedule(self, entry: Entry, wait_s: float) -> None:
        """Look at a run again after a while; one that is busy is scheduled when it no longer is."""
        entry.pause_s, entry.due = wait_s, self._clock.monotonic() + wait_s
        if not entry.busy:
            heapq.heappush(self._heap, (entry.due, next(_NUMBERS), entry))

    def pause_s(self, entry: Entry) -> float:
        """Return how long to wait before the next look at a run."""
        if entry.failures:
            return outage_pause_s(entry.failures)
        pause_s = entry.pace.wait_s() if entry.pace else SOON_S
        return min(pause_s * self._share.stretch, max(pause_s, STRETCHED_S))

    def queue(self, entry: Entry, *, first: bool = False) -> None:
        """Let a run wait for a thread; `first` before those of which only the log is read, as a matter of routine."""
        if entry.queued and first and entry in self._waiting:
            self._waiting.remove(entry)
        elif entry.queued:
            return
        entry.queued = True
        (self._urgent if first else self._waiting).append(entry)

    def next_at(self) -> float | None:
        """Return when something is to be started, in seconds of the monotonic clock; None before anything else ends."""
        times, moment = [], self._clock.monotonic()
        if self.running < THREADS:
            if self._urgent:
                times.append(moment + (0.0 if _is_free(self._urgent[0]) else self.budget.wait_s()))
            times += [moment + self._log_wait_s()] if self._waiting else []
        if self._heap and not self.asking:
            times.append(max(self._heap[0][0], moment + (self.budget.wait_s() if self.asks else 0.0)))
        return min(times) if times else None

    def may_ask(self) -> bool:
        """Return whether the platform may be asked for states now."""
        return not (self.asking or (self.asks and self.budget.wait_s() > 0))

    def read_log_soon(self, entry: Entry) -> None:
        """Let a log be read that somebody follows; it waits for no answer about states."""
        if self.may_ask():
            self.schedule(entry, 0.0)
        elif entry.handle and not entry.busy and not entry.queued:
            entry.log_only = True
            self.queue(entry, first=True)

    def _log_wait_s(self) -> float:
        self._log_budget.calls_per_s = self._logs_per_s / self._share.stretch
        return self._log_budget.wait_s()

    def note_end(self, entry: Entry) -> None:
        """Let another run have the thread of one whose attempt has ended: the rest of its log may take long."""
        if entry.busy and not entry.ending and self.ending < ENDS:
            entry.ending = True
            self.running, self.ending = self.running - 1, self.ending + 1

    def note_looked(self, entry: Entry) -> None:
        """Note that a thread has looked at a run."""
        if entry.ending:
            self.ending -= 1
        else:
            self.running -= 1
        entry.busy = entry.ending = entry.log_only = False

    # -- who ------------------------------------------------------------------------------------------------------------

    def take_known(self) -> list[Entry]:
        """Take the runs that are due. Those that a thread is to look at are queued, and the others are returned: the group
        asks for them in one call, which alternates with looks that wait for the budget."""
        if not self.may_ask() or (self._asked_last and self._look_waits()):
            return []
        known: list[Entry] = []
        soon: list[Entry] = []
        for entry in self._take_due():
            pace = entry.pace
            if pace is None or entry.again or not entry.handle or not entry.seen or not self.asks:
                entry.given = None
                entry.log_only = pace is not None and not entry.again and not pace.status_is_due
                self.queue(entry, first=True)
            elif pace.status_is_due:
                known.append(entry)
            elif pace.log_is_due:
                entry.log_only = entry.log_only or not entry.queued  # one that waits for a whole look gets that
                self.queue(entry, first=True)
            else:
                soon.append(entry)
        if known:
            known += soon
        else:
            for entry in soon:  # as before, or where somebody has just stopped to follow its log
                wait_s = entry.due - self._clock.monotonic()
                heapq.heappush(self._heap, (entry.due, next(_NUMBERS), entry)) if wait_s > 0 else self.schedule(
                    entry, self.pause_s(entry)
                )
        for entry in known:
            if entry.pace:
                entry.pace.asked()
        if known:
            self._asked_last = True
        return known

    def _look_waits(self) -> bool:
        """Return whether a look that takes from the budget can start as soon as the budget allows."""
        return self.running < THREADS and bool(self._urgent) and not _is_free(self._urgent[0])

    def _take_due(self) -> list[Entry]:
        """Take the runs that are due; where one call asks for many, those that have waited for half of their pause as well."""
        moment = self._clock.monotonic()
        if not self._heap or self._heap[0][0] > moment:
            return []
        due: dict[str, Entry] = {}
        later = []
        for row in self._heap:
            at, _, entry = row
            if entry.due != at or not entry.leased or entry.busy or entry.group is not self:
                continue  # it was scheduled anew
            if at <= moment or (self.asks and at - moment <= entry.pause_s / 2):
                due[entry.run_id] = entry
            else:
                later.append(row)
        self._heap = later
        heapq.heapify(later)
        return list(due.values())

    def take_waiting(self) -> Entry | None:
        """Take the next run that a thread may look at now."""
        if self.running >= THREADS:
            return None
        if self._urgent and (_is_free(self._urgent[0]) or self.budget.wait_s() == 0):
            entry = self._urgent.popleft()
        elif self._waiting and self._log_wait_s() == 0:
            entry = self._waiting.popleft()
        else:
            return None
        entry.queued = False
        if self._log_wait_s() < GIVE_WAY_S:  # a followed log waits for nothing, and the others give way
            self._log_budget.take(entry.nodes)
        if not entry.log_only and not entry.given:
            self.budget.take(1)
            self._asked_last = False
        return entry


def _is_free(entry: Entry) -> bool:
    """Return whether a look at a run asks for no state."""
    return entry.log_only or entry.given is not None
