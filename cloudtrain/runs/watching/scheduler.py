"""Watch runs: who is asked when, in which thread, and how often.

One thread decides (`Multiplexer.turn`); all calls of platforms are made in threads of their group, an account, cluster or
host. A call that hangs delays only its own run, or its own group's where the group has no thread left. With
`here` they are made in the thread that decides.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cloudtrain.backends.api import Backend
from cloudtrain.backends.registry import Clients
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, Unreachable
from cloudtrain.events import Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.spool import note_contact
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.sending import watch_log
from cloudtrain.runs.watching.groups import Entry, Group, InPlace, ProcessorShare
from cloudtrain.runs.watching.watch import LEASE_S, NOTICE_S, Look, Watcher
from cloudtrain.runs.watching.workers import run_sender

FEW, LATER_S = 100, 1.0  # of more runs it is noticed later that somebody has begun to follow a log
CANCELS_S = 2.0  # how often requests to cancel are looked for, beside the messages of those who make them
RETRY_LEASE_S = 0.25  # before a lease that another process holds is tried again
GIVE_UP_S = 10.0  # after so long it is left to that process, such as `cloudtrain wait --foreground`


class Multiplexer:
    """Watches runs of one home until each is final.

    Args:
        ended: called with the id of each run that needs no watching any more, on the thread of `turn`.
        here: make all calls in the thread of `turn`, and send attempts in this process: it has the environment of the runs.
    """

    def __init__(
        self,
        home: Path,
        me: Process,
        ended: Callable[[str], None] = lambda run_id: None,
        clock: Clock = SYSTEM,
        *,
        here: bool = False,
    ) -> None:
        self.home, self.me, self._ended, self._clock, self._here = home, me, ended, clock, here
        self.store = Store(home, clock)
        self.runs: dict[str, Entry] = {}
        self._groups: dict[tuple[str, str], Group] = {}
        self._clients = Clients(home, clock)
        self._threads = threading.local()  # each has its own connection to the history
        self._inbox: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._leased_at = self._lease_tried_at = self._notice_at = self._cancels_at = 0.0
        self._share = ProcessorShare(clock)
        self._pool = InPlace if here else ThreadPoolExecutor

    # -- any thread ---------------------------------------------------------------------------------------------------

    def post(self, action: Callable[[], None]) -> None:
        """Have an action done on the thread that decides."""
        self._inbox.put((self._clock.monotonic(), action))

    # -- the thread that decides --------------------------------------------------------------------------------------

    def add(self, run_id: str, environ: Mapping[str, str] | None) -> None:
        """Watch a run, or one that is watched with another environment."""
        entry = self.runs.get(run_id)
        if entry is None:
            entry = self.runs[run_id] = Entry(run_id, environ, self._clock)
        elif environ is not None:
            entry.environ = environ
            if entry.watch:
                entry.watch.environ = environ
            self.look_now(run_id)

    def look_now(self, run_id: str) -> None:
        """Look at a run at once, and often for a while: something has happened to it."""
        if entry := self.runs.get(run_id):
            entry.failures = 0
            entry.again = True
            if entry.pace:
                entry.pace.expect_change()
            if entry.group:
                entry.group.schedule(entry, 0.0)

    def turn(self, longest_s: float) -> None:
        """Do what is due; blocking until something happens, for `longest_s` seconds at the most."""
        wait_s = min(self._next_s(), longest_s)
        if self._here and wait_s > 0 and self._inbox.empty():
            self._clock.sleep(wait_s)  # no other thread posts
            wait_s = 0.0
        try:
            posted_at, action = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while True:
                self._share.note_lag(self._clock.monotonic() - posted_at)
                action()
                posted_at, action = self._inbox.get_nowait()
        except queue.Empty:
            pass
        self._renew_leases()
        self._share.measure()
        self._notice_followers()
        self._notice_cancels()
        for group in self._groups.values():
            self._dispatch(group)

    def safe_turn(self, longest_s: float) -> None:
        """Do a turn; an error, such as a full disk or a history that others lock for long, is only logged."""
        try:
            self.turn(longest_s)
        except Exception as error:
            self._complain("the watcher", error)
            self._clock.sleep(1)

    def forget(self, run_id: str) -> None:
        """Watch a run no more: another process does. A call that is under way ends by itself."""
        if self.runs.pop(run_id, None):
            self.store.abandon(self.me, run_id)

    def release(self) -> None:
        """Let other processes watch all runs; calls that are under way end by themselves."""
        self.runs.clear()
        self.store.abandon(self.me)

    def _next_s(self) -> float:
        """Return how long nothing is due, in seconds."""
        moment = self._clock.monotonic()
        times = [moment + LEASE_S, *([self._notice_at] if self.runs else [])]
        if any(not entry.leased for entry in self.runs.values()):
            times.append(self._lease_tried_at + RETRY_LEASE_S)
        times += [at for group in self._groups.values() if (at := group.next_at()) is not None]
        return max(0.0, min(times) - moment)

    def _renew_leases(self) -> None:
        moment = self._clock.monotonic()
        if moment - self._leased_at > LEASE_S / 3:
            held = self.store.renew(self.me, LEASE_S)
            self._leased_at = moment
            for entry in self.runs.values():
                if entry.leased and entry.run_id not in held:
                    entry.leased, entry.wanted = False, moment
        if moment - self._lease_tried_at >= RETRY_LEASE_S:
            self.lease_new()

    def lease_new(self) -> None:
        """Lease the runs that are not leased yet; other living processes may hold some."""
        wanted = [entry.run_id for entry in self.runs.values() if not entry.leased]
        if wanted:
            self._lease_tried_at = self._clock.monotonic()
            for run_id in sorted(self.store.lease_all(wanted, self.me, LEASE_S)):
                self._begin(self.runs[run_id])
            for entry in [self.runs[run_id] for run_id in wanted if run_id in self.runs]:
                if not entry.leased and self._clock.monotonic() - entry.wanted > GIVE_UP_S:
                    self._drop(entry)

    def _begin(self, entry: Entry) -> None:
        """Look at a run whose lease was taken."""
        entry.leased = True
        try:
            self._find_group(entry, self.store.attempts(entry.run_id)[-1])
        except (CloudtrainError, ImportError) as error:  # a backend that is not installed here
            if self._here:
                raise
            watch_log.write(f"{entry.run_id}: {error}")
            self._drop(entry)

    def _find_group(self, entry: Entry, attempt: AttemptRecord) -> None:
        backend = self._clients.get(attempt.plan)
        key = (attempt.plan.backend, backend.group or attempt.plan.target)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(" ".join(key), backend, self._share, self._clock, self._pool)
        if attempt.attempt_id != entry.attempt_id:
            entry.seen, entry.given = attempt.status, None
            entry.pace = self._watcher_of(entry).pace(attempt, backend)
        entry.attempt_id, entry.handle, entry.group = attempt.attempt_id, attempt.handle, group
        entry.nodes = int(attempt.plan.manifest.get("nodes") or 1)
        group.schedule(entry, 0.0)

    def _notice_followers(self) -> None:
        """Let a log be read soon that somebody has begun to follow."""
        moment = self._clock.monotonic()
        if moment >= self._notice_at:
            self._notice_at = moment + (NOTICE_S if len(self.runs) < FEW else LATER_S)
            for entry in self.runs.values():
                group = entry.group
                if entry.pace and group and (entry.due > moment or not group.may_ask()) and entry.pace.log_is_due:
                    group.read_log_soon(entry)
            self._notice_changes()

    def _notice_changes(self) -> None:
        """Let the marks of attempts be read, where the platform's files are here: many that change are asked for in one call."""
        for group in self._groups.values():
            if group.asks is None or not group.asks.has_marks or group.reading_marks:
                continue
            entries = [each for each in self.runs.values() if each.group is group and each.pace and each.handle]
            if entries:
                group.reading_marks = True
                group.pool.submit(self._read_marks, group, group.asks, entries)

    def _read_marks(self, group: Group, asks: Backend, entries: list[Entry]) -> None:
        found: Mapping[str, object] = {}
        ended: Mapping[str, Status] = {}
        try:
            found = asks.marks([entry.handle for entry in entries if entry.handle])
            changed = [entry.handle for entry in entries if entry.handle and entry.mark != found.get(entry.handle)]
            ended = asks.ended(changed) if changed else {}
        finally:
            self.post(lambda: self._marks_read(group, entries, found, ended))

    def _marks_read(
        self, group: Group, entries: list[Entry], found: Mapping[str, object], ended: Mapping[str, Status]
    ) -> None:
        group.reading_marks = False
        for entry in entries:
            before, entry.mark = entry.mark, found.get(entry.handle or "")
            if status := ended.get(entry.handle or ""):
                if entry.busy:
                    entry.arrived = status
                else:
                    entry.given, entry.log_only = status, False
                    self._start(group, entry)
            elif before not in (None, entry.mark) and entry.pace:
                entry.pace.expect_change()
                group.schedule(entry, 0.0)

    def _notice_cancels(self) -> None:
        """Look at once at runs that are to be cancelled: whoever asked for it may have died before telling the platform."""
        moment = self._clock.monotonic()
        if not self.runs or moment - self._cancels_at < (NOTICE_S if self._here else CANCELS_S):
            return
        self._cancels_at = moment
        for entry in [self.runs[run_id] for run_id in self.store.cancelled(self.me) if run_id in self.runs]:
            if not entry.cancelled:
                entry.cancelled = True
                self.look_now(entry.run_id)

    # -- one group ----------------------------------------------------------------------------------------------------

    def _dispatch(self, group: Group) -> None:
        """Start what is due in a group, as far as it has threads and calls left."""
        if (known := group.take_known()) and group.asks:
            group.asking = True
            group.budget.take(1 + len(known) // 100)
            group.lane.submit(self._ask, group, group.asks, known)
        while entry := group.take_waiting():
            self._start(group, entry)

    def _start(self, group: Group, entry: Entry) -> None:
        """Let a thread look at a run, unless one does, or nobody watches it here any more."""
        if self.runs.get(entry.run_id) is entry and entry.leased and not entry.busy:
            entry.busy, entry.again = True, False
            group.running += 1
            group.pool.submit(self._look, group, entry, entry.given, entry.handle)

    def _ask(self, group: Group, asks: Backend, entries: list[Entry]) -> None:
        """Ask for the states of many runs, in the group's own thread."""
        found: Mapping[str, Status] = {}
        error: Exception | None = None
        try:
            handles = [entry.handle for entry in entries if entry.handle]
            if len(handles) == 1:  # a listing may take several calls
                found = {handles[0]: asks.status(handles[0])}
            else:
                found = asks.statuses(handles)
        except Exception as problem:
            error = problem
        if error is None or isinstance(error, BackendError):
            for entry in entries:
                if error or entry.handle in found:
                    note_contact(self.home, entry.run_id, asks, error, self._clock)
        self.post(lambda: self._asked(group, entries, found, error))

    def _asked(self, group: Group, entries: list[Entry], found: Mapping[str, Status], error: Exception | None) -> None:
        group.asking = False
        if error is not None:
            self._failed(group.name, entries[0], error)
        for entry in entries:
            if entry.pace:
                entry.pace.answered(error is None)
            if entry.busy:  # its log is being read
                entry.arrived = found.get(entry.handle or "")
                continue
            entry.given, entry.log_only = found.get(entry.handle or ""), False
            group.schedule(entry, group.pause_s(entry))
            if error is None and entry.needs_look():
                given, seen = entry.given, entry.seen
                changed = given is None or seen is None or given.state is not seen.state
                group.queue(entry, first=changed)

    # -- one run ------------------------------------------------------------------------------------------------------

    def _look(self, group: Group, entry: Entry, given: Status | None, handle: str | None) -> None:
        """Look at a run, with the status that its platform has just reported of an attempt; blocking, in a thread of its
        group."""
        found = Look.SAME
        attempt: AttemptRecord | None = None
        error: Exception | None = None
        try:
            watcher = self._watcher_of(entry)
            watcher.store = store = self._own_store()
            ended = lambda: self.post(lambda: group.note_end(entry))  # noqa: E731
            found = watcher.look(given, of=handle, log_only=entry.log_only, ended=ended)
            attempt = store.attempts(entry.run_id)[-1]
            entry.pace = watcher.pace(attempt, self._clients.get(attempt.plan))
        except Exception as problem:
            found, attempt, error = Look.SAME, None, problem
        self.post(lambda: self._looked(group, entry, found, attempt, error))

    def _watcher_of(self, entry: Entry) -> Watcher:
        """Return what remembers a run between two looks."""
        if entry.watch is None:
            entry.watch = Watcher(
                self._own_store(),
                entry.run_id,
                self.me,
                may_send=self._here,
                clients=self._clients,
                environ=entry.environ,
                lease=self._renew_leases if self._here else lambda: None,
            )
        return entry.watch

    def _own_store(self) -> Store:
        store: Store | None = getattr(self._threads, "store", None)
        if store is None:
            store = self._threads.store = Store(self.home, self._clock)
        return store

    def _looked(
        self, group: Group, entry: Entry, found: Look, attempt: AttemptRecord | None, error: Exception | None
    ) -> None:
        group.note_looked(entry)
        entry.given, entry.arrived, entry.looked = entry.arrived, None, self._clock.monotonic()
        if self.runs.get(entry.run_id) is not entry:
            return
        if error is not None or attempt is None:
            entry.failures += not (entry.watch and entry.watch.log_was_read)
            self._failed(entry.run_id, entry, error)
        else:
            entry.failures = 0
            if attempt.attempt_id != entry.attempt_id or attempt.handle != entry.handle:
                self._find_group(entry, attempt)
            entry.seen = attempt.status
        if found is Look.ENDED:
            self._drop(entry)
        elif found is Look.SEND:
            entry.busy = True
            (entry.group or group).senders.submit(self._send, entry)
        else:
            entry.again = entry.again or found is Look.MOVED
            group = entry.group or group
            group.schedule(entry, 0.0 if entry.again and error is None else group.pause_s(entry))
            if entry.given and error is None and entry.needs_look():
                group.queue(entry, first=entry.given.state.final)

    def _drop(self, entry: Entry) -> None:
        del self.runs[entry.run_id]
        self.store.release(entry.run_id, self.me)
        self._ended(entry.run_id)

    def _send(self, entry: Entry) -> None:
        """Send a run's next attempt, in a process that alone has the environment of the run's shell."""
        code = 1
        try:
            end = entry.watch.end if entry.watch else None
            code = run_sender(self.home, entry.run_id, self.me, entry.environ or {}, end)
        except OSError as error:
            watch_log.write(f"{entry.run_id}: no process can be started: {error}")
        self.post(lambda: self._sent(entry, code))

    def _sent(self, entry: Entry, code: int) -> None:
        entry.busy = False
        entry.failures = entry.failures + 1 if code else 0
        entry.seen = None
        if entry.group:
            entry.group.schedule(entry, entry.group.pause_s(entry) if code else 0.0)

    def _failed(self, whom: str, entry: Entry, error: Exception | None) -> None:
        """Log an error; after a refusal ask through a new client from now on, since credentials may have been renewed."""
        self._complain(whom, error)
        if isinstance(error, BackendError) and not isinstance(error, Unreachable):
            backend = self._clients.renew(self.store.attempts(entry.run_id)[-1].plan)
            if backend and entry.group and entry.group.asks:
                entry.group.renew(backend)

    def _complain(self, whom: str, error: Exception | None) -> None:
        if error is not None and self._here and not isinstance(error, BackendError):
            raise error  # whoever runs this command reads it
        if error is not None:
            text = error if isinstance(error, CloudtrainError) else "".join(traceback.format_exception(error))
            watch_log.write(f"{whom}: {text}")
