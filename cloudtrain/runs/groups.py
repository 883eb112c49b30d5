"""The runs that a watcher asks for in one call, when each is due, and what a look at one needs."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from cloudtrain.backends.api import Backend, HasStatuses
from cloudtrain.events import State, Status
from cloudtrain.runs import rates
from cloudtrain.runs.pace import Pace
from cloudtrain.runs.watch import Watcher

THREADS = 4  # of one group, beside the one that asks for states
SOON_S = 0.5  # before a look at a run of which nothing is known yet
UNREAD_S = 60.0  # the longest time between two looks into the history at a run that logs nothing yet
_LOGS = frozenset({State.RUNNING, State.STOPPING})
_NUMBERS = itertools.count()


class Entry:
    """A run that is watched. Only the thread that decides changes it, except `watch` while it is busy."""

    def __init__(self, run_id: str, environ: Mapping[str, str] | None) -> None:
        self.run_id, self.environ = run_id, environ
        self.group: Group | None = None
        self.watch: Watcher | None = None
        self.attempt_id = ""
        self.handle: str | None = None
        self.wanted = time.monotonic()  # since when its lease is wanted
        self.leased = False
        self.busy = False  # a thread looks at it
        self.queued = False  # it waits for a thread
        self.again = False  # look at it once more at once
        self.log_only = False  # somebody follows its log, and its state is not due
        self.cancelled = False  # a request to cancel was seen
        self.seen: Status | None = None  # in the store
        self.given: Status | None = None  # from the group's last call
        self.arrived: Status | None = None  # the same, while a thread looked at the run
        self.pace: Pace | None = None  # known after the first look
        self.looked = -UNREAD_S
        self.due = 0.0
        self.failures = 0

    def needs_look(self) -> bool:
        """Return whether more than the platform's status is due: it has changed, or there may be new log lines."""
        given, seen = self.given, self.seen
        if given is None or seen is None or given.state in _LOGS or given.state.final or self.again:
            return True
        same = (given.state, given.reason, given.started_at) == (seen.state, seen.reason, seen.started_at)
        return not same or time.monotonic() - self.looked > UNREAD_S


class Group:
    """Runs of one account, cluster or host: their threads, their limit of calls, and when each is due."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name, self.poll_s = name, backend.poll_s
        self.asks: HasStatuses | None = None
        self.renew(backend)
        self.budget = rates.Budget(self.asks.calls_per_s if self.asks else rates.CALLS_PER_S)
        self.pool = ThreadPoolExecutor(THREADS, name)
        self.lane = ThreadPoolExecutor(1, name)  # for the call that asks for all states
        self.log_budget = rates.Budget(max(self.budget.calls_per_s, rates.LOGS_PER_S))
        self.urgent: deque[Entry] = (
            deque()
        )  # wait for a thread and the budget: something has changed, or somebody follows
        self.waiting: deque[Entry] = deque()  # for new lines of the log
        self.running = 0
        self.asking = False
        self.failures = 0
        self.not_before = 0.0
        self._heap: list[tuple[float, int, Entry]] = []

    def renew(self, backend: Backend) -> None:
        """Ask through another object from now on."""
        self.asks = backend if isinstance(backend, HasStatuses) else None

    def schedule(self, entry: Entry, wait_s: float) -> None:
        """Look at a run again after a while; one that is busy is scheduled when it no longer is."""
        entry.due = time.monotonic() + wait_s
        if not entry.busy:
            heapq.heappush(self._heap, (entry.due, next(_NUMBERS), entry))

    def queue(self, entry: Entry, *, first: bool = False) -> None:
        """Let a run wait for a thread; `first` before those of which only the log is read, as a matter of routine."""
        if entry.queued and first and entry in self.waiting:
            self.waiting.remove(entry)
        elif entry.queued:
            return
        entry.queued = True
        (self.urgent if first else self.waiting).append(entry)

    def next_at(self) -> float | None:
        """Return when something is to be started, in seconds of the monotonic clock; None before anything else ends."""
        times = []
        if self.running < THREADS:
            moment = time.monotonic()
            if self.urgent:
                times.append(
                    moment + (0.0 if self.urgent[0].log_only or self.urgent[0].given else self.budget.wait_s())
                )
            times += [moment + self.log_budget.wait_s()] if self.waiting else []
        if self._heap and not self.asking:
            times.append(max(self._heap[0][0], time.monotonic() + (self.budget.wait_s() if self.asks else 0.0)))
        return max(min(times), self.not_before) if times else None

    def take_due(self) -> list[Entry]:
        """Take the runs that are due; where one call asks for many, those that soon are as well."""
        moment = time.monotonic()
        if not self._heap or self._heap[0][0] > moment:
            return []
        until = moment + (self.poll_s / 2 if self.asks else 0.0)
        due: dict[str, Entry] = {}
        while self._heap and self._heap[0][0] <= until:
            at, _, entry = heapq.heappop(self._heap)
            if entry.due == at and entry.leased and not entry.busy and entry.group is self:
                due[entry.run_id] = entry
        return list(due.values())

    def take_waiting(self) -> Entry | None:
        """Take the next run that a thread may look at now."""
        if self.running >= THREADS:
            return None
        if self.urgent and (self.urgent[0].log_only or self.urgent[0].given or self.budget.wait_s() == 0):
            entry = self.urgent.popleft()
        elif self.waiting and self.log_budget.wait_s() == 0:
            entry = self.waiting.popleft()
        else:
            return None
        entry.queued = False
        if not entry.log_only:  # a followed log is read at its own pace
            self.log_budget.take(1)
            self.budget.take(0 if entry.given else 1)
        return entry
