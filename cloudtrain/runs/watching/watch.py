"""Look at one run: collect its log, metrics and status into the store, and start the next attempt when one is due.

Who watches runs looks again and again (scheduler.py), a reader once where no process watches. A lease in the store says who may.
All that is needed is in the store, and the job does not depend on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum

from cloudtrain import events
from cloudtrain.backends.api import Backend
from cloudtrain.backends.registry import Clients
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, LogDenied, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.history.records import AttemptRecord, RunRecord
from cloudtrain.history.spool import OLD_AFTER_S, Spool, note_contact
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import upstream
from cloudtrain.runs.planning.attempts import FIRST_POLL_S, pause
from cloudtrain.runs.sending import handover, outcomes, retry, send, waiting
from cloudtrain.runs.watching.collect import Collector
from cloudtrain.runs.watching.ending import AttemptEnds

LEASE_S = 30.0
REST_S = 1.0  # how long a state waits for the log: of a live run it is asked again, an end is stored before the rest
DENIED_S = 60.0  # after it a log that the account may not read is tried again
SOON_S = 0.05  # the first pause between two questions when a change is expected; each one is twice as long
# The longest time until a request to cancel, or a new reader, is noticed; the shortest between two reads.
NOTICE_S = 0.2
OLD_S = 30.0  # how rarely an attempt older than OLD_AFTER_S is asked about, unless its platform is a simulator
SIMULATED_S = 1.0  # which wants to be asked more often than this
OUTAGE_S, OUTAGE_MAX_S = 1.0, 60.0  # before a platform that did not answer is asked again; doubled each time
NOTED_S = 1.0  # how often it is noted for readers that the platform has answered


class Pace:
    """The pace for one attempt.

    A platform that is shared is asked once in `poll_s`, more often only after something that makes a change likely. Its
    log is read together with the status, and once in `follow_s` while somebody follows it. Other platforms are asked
    at every look, and a new attempt is looked at more often than an old one.
    """

    def __init__(
        self, backend: Backend, followed: Callable[[], bool], age_s: float = 0.0, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._shared = backend.follow_s is not None
        self._poll_s = max(backend.poll_s, FIRST_POLL_S)
        self._follow_s = max(backend.follow_s, NOTICE_S) if backend.follow_s is not None else 0.0
        self._followed = followed
        self._began = self._clock.monotonic() - age_s
        self._read_at = self._clock.monotonic()
        self._cancelled = False
        self._unanswered = 0  # questions in a row
        self.expect_change()

    def expect_change(self) -> None:
        """Ask at once, and soon again: something was submitted, cancelled or printed that changes the status."""
        self._pause_s, self._due = SOON_S, self._clock.monotonic()

    def expect_cancel(self) -> None:
        """Ask at once when a request to cancel is seen for the first time."""
        if not self._cancelled:
            self._cancelled = True
            self.expect_change()

    @property
    def status_is_due(self) -> bool:
        """Whether the platform is to be asked for the status now."""
        return not self._shared or self._clock.monotonic() >= self._due

    @property
    def log_is_due(self) -> bool:
        """Whether the log is to be read now, though the status is not due."""
        return self._shared and self._clock.monotonic() >= self._read_at + self._follow_s and self._followed()

    def asked(self) -> None:
        """Note that the status is asked for now."""
        moment = self._clock.monotonic()
        old = self._poll_s > SIMULATED_S and moment - self._began > OLD_AFTER_S
        pause_s = min(self._pause_s, max(self._poll_s, OLD_S) if old else self._poll_s)
        self._due = moment + pause_s * random.uniform(1.0, 1.05)  # homes that began together are spread in time
        self._pause_s = min(self._pause_s * 2, OLD_S)

    def answered(self, answer: bool) -> None:
        """Note whether the platform has said the status; after questions without an answer it is asked ever more rarely."""
        self._unanswered = 0 if answer else self._unanswered + 1
        if not answer:
            self._due = self._clock.monotonic() + outage_pause_s(self._unanswered)

    def read(self) -> None:
        """Note that the log was read just now."""
        self._read_at = self._clock.monotonic()

    def wait_s(self) -> float:
        """Return how long to wait before the next look."""
        now = self._clock.monotonic()
        if not self._shared:
            return pause(now - self._began, self._poll_s)
        until = min(self._due, self._read_at + self._follow_s) if self._followed() else self._due
        return max(until - now, FIRST_POLL_S)


def outage_pause_s(failures: int) -> float:
    """Return how long to wait after so many looks in a row without an answer."""
    return min(OUTAGE_S * 2.0 ** min(failures - 1, 20), OUTAGE_MAX_S) * random.uniform(0.9, 1.1)


class Look(Enum):
    """What one look at a run has found."""

    SAME = "nothing to do before the next look"
    MOVED = "the run or its attempt changed: look again at once"
    SEND = "an attempt is due, for a process that may send it"
    ENDED = "the run is final"


class Watcher(AttemptEnds):
    """Looks at one run until it is final, and remembers it between two looks.

    Args:
        complain: what is done where a platform cannot be asked; None to log it.
        may_send: False where it starts no attempt itself: `look` then says that one is due.
        clients: those of several runs; None for its own.
        environ: the environment of the shell that submitted the run, for notifications; None for this process's.
        lease: called while a look takes long; None to take and renew the run's lease.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        me: Process | None = None,
        complain: Callable[[CloudtrainError], None] | None = None,
        *,
        may_send: bool = True,
        clients: Clients | None = None,
        environ: Mapping[str, str] | None = None,
        lease: Callable[[], object] | None = None,
    ) -> None:
        self.store, self.run_id, self.environ, self.me = store, run_id, environ, me or Process.here()
        self.clients = clients or Clients(store.home, store.clock)
        self._complain, self._may_send = complain or self._log, may_send
        self._log_home = store.home if complain else None  # the standard error of who reads is its user's
        self._lease = lease or (lambda: self.store.lease(run_id, self.me, LEASE_S))
        self.collector = Collector(self._lease, self._log)
        self._cancelled: set[str] = set()
        self._ended: Callable[[], None] = lambda: None
        self._paces: dict[str | None, Pace] = {}  # of the handle that is looked at
        self._noted_at = -NOTED_S
        self._log_is_complete = False
        self.log_was_read = False  # though the platform has not said the status
        self._log_denied: tuple[float, LogDenied] | None = None  # when, and the error

    def refresh(self, *, hold: bool = False) -> Status | None:
        """Bring the store up to date as far as something is due, and return the run's status; blocking.

        Returns None when another process holds the lease, or when the history is no longer there. The lease is kept with
        `hold` alone, where each question costs the platform something, until the run is final.
        """
        while self._lease() and self.store.database.path.exists():  # SQLite would go on with a file that was removed
            run, attempt = self._newest()
            if self._is_over(run):
                self.store.release(self.run_id, self.me)
                return run.status
            backend = self.clients.get(attempt.plan)
            try:
                if self._step_when_due(run, attempt, backend):
                    continue
            except BackendError as error:
                note_contact(self.store.home, self.run_id, backend, error, self.store.clock)
                if not isinstance(error, Unreachable):
                    self.clients.renew(attempt.plan)
                self._complain(error)
            if not (hold and backend.follow_s is not None):
                self.store.release(self.run_id, self.me)
            return run.status
        return None

    def look(
        self,
        status: Status | None = None,
        *,
        of: str | None = None,
        log_only: bool = False,
        log_is_complete: bool = False,
        ended: Callable[[], None] = lambda: None,
    ) -> Look:
        """Bring the store up to date with the newest attempt once, for who watches many runs; blocking.

        Args:
            status: what the platform has just reported, None to ask it here.
            of: the handle of the attempt that it is of; None for the newest. Of an older attempt it does not count.
            log_only: only read the log, which somebody follows.
            log_is_complete: the rest of the attempt's log was read when it ended.
            ended: called when the attempt has ended, before the rest of its log is read: that may take long.

        Raises BackendError, and StoreError where the history cannot be used.
        """
        self.log_was_read = False
        run, attempt = self._newest()
        if self._is_over(run):
            return Look.ENDED
        if (
            attempt.handle is None
            and not attempt.status.state.final
            and not self._may_send
            and not upstream.is_held(attempt)
            and outcomes.is_wanted(run, attempt, self.store.clock)
        ):
            clock = self.store.clock
            due = outcomes.is_free(attempt, clock) and retry.outage_is_over(attempt, clock)
            return Look.SEND if due else Look.SAME
        backend = self.clients.get(attempt.plan)
        try:
            if log_only and attempt.handle is not None:
                self._read_log(attempt, backend)
                return Look.SAME
            self.send_due, self.end, self._ended = False, None, ended
            self._log_is_complete = log_is_complete
            moved = self._ask(run, attempt, backend, status if of in (None, attempt.handle) else None)
        except BackendError as error:
            note_contact(self.store.home, self.run_id, backend, error, self.store.clock)
            raise
        if moved and self._is_over(self._newest()[0]):
            return Look.ENDED  # and no look more, which would count as a call
        return Look.MOVED if moved else Look.SEND if self.send_due else Look.SAME

    def pace(self, attempt: AttemptRecord, backend: Backend) -> Pace:
        """Return when an attempt is to be looked at."""
        if attempt.handle not in self._paces:
            clock = self.store.clock
            followed = Spool(self.store.home, self.run_id, attempt.number, clock).is_followed
            self._paces = {attempt.handle: Pace(backend, followed, outcomes.age_s(attempt, clock), clock)}
        return self._paces[attempt.handle]

    def _step_when_due(self, run: RunRecord, attempt: AttemptRecord, backend: Backend) -> bool:
        """Look at the newest attempt as often as its platform may be asked, and at its log as often as it is followed."""
        pace = self.pace(attempt, backend)
        if run.cancel_requested:
            pace.expect_cancel()
        if attempt.handle is None or pace.status_is_due:
            return self._ask(run, attempt, backend)
        if pace.log_is_due:
            self._read_log(attempt, backend)
        return False

    def _ask(self, run: RunRecord, attempt: AttemptRecord, backend: Backend, status: Status | None = None) -> bool:
        """Do a step, and note for readers that the platform was asked."""
        if status is None:
            self.pace(attempt, backend).asked()
        moved = self.step(run, attempt, backend, status)
        if self.store.clock.monotonic() - self._noted_at > NOTED_S:
            denied = self._log_denied[1] if self._log_denied else None
            note_contact(self.store.home, self.run_id, backend, denied, self.store.clock)
            self._noted_at = self.store.clock.monotonic()
        return moved

    def step(self, run: RunRecord, attempt: AttemptRecord, backend: Backend, status: Status | None = None) -> bool:
        """Bring the store up to date with the newest attempt once; True when the run or its attempt moved on."""
        if attempt.handle is None:
            if attempt.status.state.final:  # it was refused for lack of machines, and another attempt follows
                return self.follow_up(run, attempt, attempt.status, backend)
            if upstream.is_held(attempt):
                self.send_due, moved = waiting.advance(self.store, run, attempt, may_send=self._may_send)
                return moved
            return send.settle(self.store, run, attempt, backend, may_send=self._may_send)
        if run.status.state.final:  # the rest of its log is unread, because a watcher was killed
            status = run.status
        # `cloudtrain cancel` may have died after storing the request and before calling the platform.
        to_cancel = run.cancel_requested and attempt.attempt_id not in self._cancelled
        if to_cancel and self.cancel(backend, attempt.handle):
            self._cancelled.add(attempt.attempt_id)
        status = status or self._status(attempt, backend, attempt.handle)
        withdrawn = "" if run.cancel_requested else retry.why_withdrawn(self.store, attempt, status)
        status = retry.ended(attempt, status, withdrawn)
        if status.state.final:
            self._ended()
        if run.cancel_requested and status.state.final and status.state is not State.SUCCEEDED:
            confirmed = attempt.attempt_id in self._cancelled or not retry.has_candidates(attempt.plan)
            if status.state is State.LOST and not confirmed:
                return False  # it may live on: its platform is asked once more to end it
            why = self.store.why_cancelled(self.run_id)
            status = replace(status, state=State.CANCELLED, exit_code=None, reason=why, event="")
        if not self._log_is_complete:  # after the status: when that is final, the log is whole now
            self._read_log(attempt, backend, status)
        self.collector.read_files(self.store, attempt, at_once=status.state.final)
        if status.state.final:
            return self.follow_up(run, attempt, status, backend)
        status, stored = replace(status, reason=events.short_reason(status.reason)), attempt.status
        moved = (status.state, status.started_at) != (stored.state, stored.started_at)
        if moved or status.reason != stored.reason:
            self.store.record(attempt.attempt_id, status=status)
            self.store.set_status(self.run_id, status)
        # The decision is stored by now: whoever watches next knows why the attempt was cancelled.
        if withdrawn and attempt.attempt_id not in self._cancelled and self.cancel(backend, attempt.handle):
            self._cancelled.add(attempt.attempt_id)
        if moved and status.state is State.RUNNING:
            self.ask_images(attempt, backend)  # again where the platform has started it anew
        elif moved:
            self.pace(attempt, backend).expect_change()
        return False

    def _status(self, attempt: AttemptRecord, backend: Backend, handle: str) -> Status:
        """Ask the platform for the status. Where one that is shared does not answer, the log is read all the same."""
        try:
            status = backend.status(handle)
        except BackendError:
            if backend.follow_s is not None:
                self._read_log(attempt, backend)
                self.log_was_read = True
                self.pace(attempt, backend).answered(False)
            raise
        self.pace(attempt, backend).answered(True)
        return status

    def _read_log(self, attempt: AttemptRecord, backend: Backend, status: Status | None = None) -> None:
        pace, began = self.pace(attempt, backend), self.store.clock.monotonic()
        ended = status is not None and status.state.final
        if self._log_denied and began - self._log_denied[0] < DENIED_S and not ended:
            pace.read()
            return

        is_long = False

        def go_on() -> bool:
            nonlocal is_long
            is_long = self.store.clock.monotonic() - began >= REST_S
            return not is_long

        try:
            if self.collector.read_log(self.store, attempt, backend, ended=ended, go_on=go_on):
                pace.expect_change()
            self._log_denied = None
        except LogDenied as error:  # the platform's state counts without it
            if not self._log_denied:
                self._complain(error)
            self._log_denied = self.store.clock.monotonic(), error
        if is_long and status and ended:
            attempt = self.store.attempts(self.run_id)[-1]
            self.store_end(attempt, status, backend)
            self.collector.read_log(self.store, attempt, backend, ended=True)
        for alarm in [each for each in self.collector.alarms if each[0] == attempt.attempt_id]:
            self.collector.alarms.discard(alarm)
            self._notify(attempt, alarm[1], final=False)
        pace.read()

    def _is_over(self, run: RunRecord) -> bool:
        return run.status.state.final and (run.attached is not None or not self.store.is_unread(self.run_id))

    def _newest(self) -> tuple[RunRecord, AttemptRecord]:
        return self.store.find(self.run_id), self.store.attempts(self.run_id)[-1]


def send_next(store: Store, run_id: str, owner: Process, end: tuple[str, Status] | None) -> None:
    """Look at one run for its watcher and send its next attempt; `end` is how the watcher saw which attempt end.

    Asking again is not the same: that a machine is lost is known only to a process that has missed it for long enough.
    """
    if not store.lease(run_id, owner, LEASE_S):
        return  # another watcher has taken over, and sends it itself
    looks, before = Watcher(store, run_id, owner), store.attempts(run_id)[-1]
    status = end[1] if end and end[0] == before.attempt_id else None
    # The watcher has read the log before it noted the end. A machine that was lost would not answer here.
    while (
        looks.look(status, log_is_complete=status is not None) is Look.MOVED
        and store.attempts(run_id)[-1].handle is None
    ):
        status = None
    newest = store.attempts(run_id)[-1].plan
    if newest.backend != before.plan.backend:  # which needs other credentials: the watcher chooses the process
        handover.start(store, newest)
