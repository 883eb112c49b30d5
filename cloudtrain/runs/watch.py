"""Watch one run: collect its log, metrics and status into the store, and start the next attempt when one is due.

The watcher of a home (runs/watch_all.py) does it for all runs, `cloudtrain watch` for one in the foreground, a reader once
where nobody watches. A lease in the store says who. All that is needed is in the store, and the job does not depend on it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain import events
from cloudtrain.backends.api import Backend, HasImages, HasRemoteLog, Plan
from cloudtrain.backends.images import pinned_image
from cloudtrain.backends.manifest import secret_names, unset_secrets
from cloudtrain.diagnosis.tail import Tail
from cloudtrain.errors import BackendError, CapReached, CloudtrainError, Unreachable
from cloudtrain.events import Event, LogLine, Row, State, Status
from cloudtrain.history.records import AttemptRecord, RunRecord
from cloudtrain.history.store import Store
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process
from cloudtrain.runs import asked, retry, send, watcher
from cloudtrain.runs.attempts import backend_of, replan
from cloudtrain.runs.metric_files import MetricFiles
from cloudtrain.runs.metric_lines import MetricLines
from cloudtrain.runs.pace import NOTICE_S, Pace
from cloudtrain.runs.spool import Spool, SpoolTaken

if TYPE_CHECKING:
    from cloudtrain.source.bundle import Bundle

LEASE_S = 30.0
NOTED_S = 1.0  # how often it is noted for readers that the platform has answered
BATCH = 2000  # lines in one transaction


class Look(Enum):
    """What one look at a run has found."""

    SAME = "nothing to do before the next look"
    MOVED = "the run or its attempt moved on: look again at once"
    SEND = "an attempt is to be sent, by somebody who may"
    ENDED = "the run is final"


class Watcher:
    """Watches one run until it is final.

    Args:
        may_send: False where it only reads: it starts no attempt.
        backend: returns the backend of an attempt, where several runs share one.
        environ: the environment of the shell that submitted the run, for notifications; None for this process's.
        lease: renews the lease meanwhile and returns whether it is still held, where somebody else does that.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        me: Process | None = None,
        complain: Callable[[CloudtrainError], None] | None = None,
        *,
        may_send: bool = True,
        backend: Callable[[AttemptRecord], Backend] | None = None,
        environ: Mapping[str, str] | None = None,
        lease: Callable[[], bool] | None = None,
    ) -> None:
        self._may_send = may_send
        self._backend = backend or self._own_backend
        self.environ = environ
        self._lease = lease or self._own_lease
        self._send_due = False
        self.end: tuple[str, Status] | None = None  # of the newest attempt, which another process follows up
        self._complain = complain or self._write  # what is done where a platform cannot be asked
        self.store = store
        self.run_id = run_id
        self.me = me or Process.here()
        self._metrics: dict[str, MetricLines] = {}
        self._cancelled: set[str] = set()
        self._leased_at = 0.0
        self._files: dict[str, MetricFiles] = {}
        self._tails: dict[str, Tail] = {}  # of attempts that were watched from their first line on
        self._cached_backend: tuple[str, Backend] | None = None  # attempt id and client: making one is slow
        self._paces: dict[str | None, Pace] = {}  # of the handle that is looked at
        self._spools: dict[str, Spool | None] = {}
        self._noted_at = -NOTED_S

    def run(self, until: Callable[[], bool] = lambda: False, *, hold: bool = False) -> Status | None:
        """Watch until the run is final or `until` returns true, and return its status; blocking.

        Returns None when another process holds the lease, or when the history is no longer there. The lease is released,
        with `hold` only where the
        platform costs nothing, or when the run is final.
        """
        while self._lease() and self.store.database.path.exists():  # SQLite would go on with a file that was removed
            run, attempt = self._newest()
            if run.status.state.final:
                self.store.release(self.run_id, self.me)
                return run.status
            backend = self._backend(attempt)
            try:
                moved = self._step_when_due(run, attempt, backend)
            except BackendError as error:
                asked.note(self.store.home, self.run_id, backend, error)
                moved = False
                if not isinstance(error, Unreachable):
                    self._cached_backend = None  # a new client next time: credentials may be renewed
                self._complain(error)
            if moved:
                continue
            if until():
                if not (hold and isinstance(backend, HasRemoteLog)):
                    self.store.release(self.run_id, self.me)
                return run.status
            time.sleep(min(self.pace(attempt, backend).wait_s(), NOTICE_S))
        return None

    def look(self, status: Status | None = None, *, log_only: bool = False) -> Look:
        """Bring the store up to date with the newest attempt once, for who watches many runs; blocking.

        Args:
            status: what the platform has just reported of the newest attempt, None to ask it here.
            log_only: only read the log, which somebody follows.

        Raises BackendError, and StoreError where the history cannot be used.
        """
        run, attempt = self._newest()
        if run.status.state.final:
            return Look.ENDED
        if (
            attempt.handle is None
            and not attempt.status.state.final
            and not self._may_send
            and send.is_wanted(run, attempt)
        ):
            return Look.SEND if send.is_free(attempt) and retry.outage_is_over(attempt) else Look.SAME
        backend = self._backend(attempt)
        try:
            if log_only and attempt.handle is not None:
                self._read_log(attempt, backend)
                return Look.SAME
            self._send_due, self.end = False, None
            moved = self._ask(run, attempt, backend, status)
        except BackendError as error:
            asked.note(self.store.home, self.run_id, backend, error)
            raise
        return Look.MOVED if moved else Look.SEND if self._send_due else Look.SAME

    def pace(self, attempt: AttemptRecord, backend: Backend) -> Pace:
        """Return when an attempt is to be looked at."""
        if attempt.handle not in self._paces:
            followed = Spool(self.store.home, self.run_id, attempt.number).is_followed
            self._paces = {attempt.handle: Pace(backend, followed, send.age_s(attempt))}
        return self._paces[attempt.handle]

    def _write(self, error: CloudtrainError | str) -> None:
        print(f"{now()} {self.run_id}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the watcher's own log

    def _own_backend(self, attempt: AttemptRecord) -> Backend:
        if self._cached_backend is None or self._cached_backend[0] != attempt.attempt_id:
            self._cached_backend = (attempt.attempt_id, backend_of(attempt.plan, self.store.home))
        return self._cached_backend[1]

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
        if time.monotonic() - self._noted_at > NOTED_S:
            asked.note(self.store.home, self.run_id, backend)
            self._noted_at = time.monotonic()
        return moved

    def step(self, run: RunRecord, attempt: AttemptRecord, backend: Backend, status: Status | None = None) -> bool:
        """Bring the store up to date with the newest attempt once; True when the run or its attempt moved on."""
        if attempt.handle is None:
            if attempt.status.state.final:  # it was refused for lack of machines, and another attempt follows
                return self._follow_up(run, attempt, attempt.status, backend)
            return send.settle(self.store, run, attempt, backend, may_send=self._may_send)
        # `cloudtrain cancel` may have died after storing the request and before calling the platform.
        to_cancel = run.cancel_requested and attempt.attempt_id not in self._cancelled
        if to_cancel and self._cancel(backend, attempt.handle):
            self._cancelled.add(attempt.attempt_id)
        status = status or backend.status(attempt.handle)
        self._read_log(attempt, backend, ended=status.state.final)  # after the status: when final, the log is whole now
        if run.cancel_requested and status.state.final and status.state is not State.SUCCEEDED:
            status = replace(status, state=State.CANCELLED, exit_code=None, reason="cancelled", event="")
        self._read_files(attempt, at_once=status.state.final)
        if status.state.final:
            return self._follow_up(run, attempt, status, backend)
        status, stored = replace(status, reason=events.short_reason(status.reason)), attempt.status
        moved = (status.state, status.started_at) != (stored.state, stored.started_at)
        if moved or status.reason != stored.reason:
            self.store.record(attempt.attempt_id, status=status)
            self.store.set_status(self.run_id, status)
        if moved and status.state is State.RUNNING:
            self._ask_images(attempt, backend)  # again where the platform has started it anew
        elif moved:
            self.pace(attempt, backend).expect_change()
        return False

    def catch_up(self, statuses: Mapping[str, Status], files: Callable[[], None]) -> None:
        """Store the logs and statuses of an attached run's attempts, once; starts nothing and notifies nobody.

        Attempts that are gone from the output stay as they are stored. `files` stores the event files, after the logs.
        """
        attempts = [attempt for attempt in self.store.attempts(self.run_id) if attempt.attempt_id in statuses]
        backends = [backend_of(attempt.plan, self.store.home, attempt.handle) for attempt in attempts]
        for attempt, backend in zip(attempts, backends, strict=True):
            self._read_log(attempt, backend, ended=statuses[attempt.attempt_id].state.final)
        files()
        for attempt, backend in zip(attempts, backends, strict=True):
            status = statuses[attempt.attempt_id]
            if status.state.final:
                self._diagnose(attempt, status, backend)
            if status != attempt.status:
                self.store.overwrite_status(attempt.attempt_id, status)

    def _read_log(self, attempt: AttemptRecord, backend: Backend, *, ended: bool = False) -> None:
        assert attempt.handle is not None
        if attempt.cursor is None:
            self._tails.setdefault(attempt.attempt_id, Tail())
        tail = self._tails.get(attempt.attempt_id)
        if attempt.attempt_id not in self._metrics:
            self._metrics[attempt.attempt_id] = MetricLines(self.store, attempt)
        metrics = self._metrics[attempt.attempt_id]
        for batch in self._new_lines(attempt, backend):
            others: list[Event] = []
            points: list[Row] = []
            for line in batch:
                if parsed := events.parse(line.text):
                    event = Event(attempt.attempt_id, line.node, line.seq, line.at, *parsed)
                    if event.kind == "metric":
                        points += metrics.event_rows(event, line.rank)
                    else:
                        others.append(event)
                if not line.text.startswith(events.MARK):
                    if tail:
                        tail.add(line)
                    points += metrics.rows(line)
            self.store.record(attempt.attempt_id, cursor=batch[-1].cursor, events=others, metrics=points)
            self._lease()
            if any(event.kind in ("state", "result") for event in others):
                self.pace(attempt, backend).expect_change()
        if ended and (points := metrics.rest()):
            self.store.record(attempt.attempt_id, metrics=points)
        self.pace(attempt, backend).read()
        if spool := self._spools.get(attempt.attempt_id):
            spool.touch()

    def _new_lines(self, attempt: AttemptRecord, backend: Backend) -> Iterator[list[LogLine]]:
        """Yield the lines of a log that are not in the history yet, in batches; what is spooled is so before it is yielded.

        The end of the spool says what was read. It is behind the history's cursor where a watcher was killed in between.
        """
        assert attempt.handle is not None
        if attempt.attempt_id not in self._spools:
            self._spools[attempt.attempt_id] = Spool.open(self.store.home, attempt, backend)
        spool, cursor = self._spools[attempt.attempt_id], attempt.cursor
        if spool and spool.cursor != cursor:
            lines = spool.lines(cursor)
            while batch := list(islice(lines, BATCH)):
                yield batch
            cursor = spool.cursor
        lines = iter(backend.logs(attempt.handle, after=cursor))
        while batch := list(islice(lines, BATCH)):
            try:
                if spool:
                    spool.append(batch)
            except SpoolTaken:
                del self._spools[attempt.attempt_id]
                raise
            except OSError as error:  # the disk is full: readers ask the platform from now on
                self._write(f"the log is not kept: {error}")
                spool.remove() if spool else None
                spool = self._spools[attempt.attempt_id] = None
            yield batch

    def _read_files(self, attempt: AttemptRecord, *, at_once: bool) -> None:
        """Store what trackers' files have that the log has not."""
        if attempt.attempt_id not in self._files:
            self._files[attempt.attempt_id] = MetricFiles(self.store, attempt)
        self._files[attempt.attempt_id].read(self._lease, at_once=at_once)

    def _follow_up(self, run: RunRecord, attempt: AttemptRecord, status: Status, backend: Backend) -> bool:
        """Store an attempt's end, unless the next one waits for capacity, or is to be started by another process."""
        if not run.cancel_requested and retry.allowed(attempt.plan, status):
            if reason := retry.waits_for_capacity(attempt.attempt_id, attempt.number, status):
                if (run.status.state, run.status.reason) != (State.QUEUED, reason):
                    waiting = Status(State.QUEUED, None, reason, status.started_at, url=status.url)
                    self.store.set_status(self.run_id, waiting)
                return False
            if not self._may_send:
                self._send_due, self.end = True, (attempt.attempt_id, status)
                return False
        return self._end(run, attempt, status, backend)

    def _end(self, run: RunRecord, attempt: AttemptRecord, status: Status, backend: Backend) -> bool:
        """Store an attempt's end, and start the next attempt where one is due, else store the run's end."""
        if run.cancel_requested and attempt.handle is None:
            status = Status(State.CANCELLED, None, "cancelled before it started", ended_at=now())
        if status.ended_at is None:
            status = Status(status.state, status.exit_code, status.reason, status.started_at, now(), status.url)
        if status.state is State.LOST and attempt.handle is not None:
            self._cancel(backend, attempt.handle)  # what is left of it must not run beside the next attempt
        self.store.record(attempt.attempt_id, status=status)
        if len(attempt.images) < int(attempt.plan.manifest.get("nodes") or 1):
            self._ask_images(attempt, backend)
        if status.state is State.PREEMPTED:
            self._notify(attempt, status, final=False)
        if not run.cancel_requested and retry.allowed(attempt.plan, status):
            number = attempt.number
            reason = "" if status.event == "capacity" else retry.without_progress(self.store, self.run_id, number)
            if unset := unset_secrets(attempt.plan):
                reason = f"no new attempt: {unset} in the watcher's environment"
            if not reason:
                try:
                    earlier = self.store.attempts(self.run_id)
                    plan, bundle = replan(attempt.plan, attempt.number + 1, backend, self.store.home, earlier=earlier)
                except CapReached as error:
                    status, reason = replace(status, state=State.TIMED_OUT), f"{error.message}; {error.hint}"
                except BackendError as error:  # asked again it would be the same: its bundle is gone
                    reason = f"no new attempt: {error.message}"
                else:
                    self._retry(attempt, status, backend, plan, bundle)
                    return True
            status = replace(status, reason=f"{status.reason}; {reason}".lstrip("; "))
        self._diagnose(attempt, status, backend)
        self.store.set_status(self.run_id, status)
        self._notify(attempt, status, final=True)
        return True

    def _ask_images(self, attempt: AttemptRecord, backend: Backend) -> None:
        """Store which container images an attempt's nodes run, where its platform reports them; an error is only logged."""
        if attempt.handle is None or not isinstance(backend, HasImages):
            return
        self._lease()  # it may take seconds
        try:
            if images := {
                node: text for node, image in backend.images(attempt.handle).items() if (text := pinned_image(image))
            }:
                self.store.keep_images(attempt.attempt_id, images)
        except BackendError as error:
            self._write(error)
        except Exception as error:
            self._write(f"no images: {error!r}")

    def _diagnose(self, attempt: AttemptRecord, status: Status, backend: Backend) -> None:
        """Store why the run failed, before its end: whoever waits for the end finds the verdict. An error is only logged."""
        if not status.failed:
            return  # a successful run needs no diagnosis, and importing the rules takes time
        from cloudtrain.diagnosis import record

        try:
            tail = self._tails.get(attempt.attempt_id)
            if tail is None:
                tail, spool = Tail(), self._spools.get(attempt.attempt_id)
                for line in spool.lines() if spool else backend.logs(attempt.handle) if attempt.handle else ():
                    tail.add(line)
            record.judge_attempt(self.store, attempt, status, tail.lines())
        except Exception as error:
            self._write(f"no verdict: {error}")

    def _notify(self, attempt: AttemptRecord, status: Status, *, final: bool) -> None:
        """Send the notifications that cloudtrain.toml asks for; an error is only logged."""
        from cloudtrain.runs import notify

        try:
            if event := notify.event_of(status, final=final):
                hidden = secret_names(attempt.plan)
                notify.start(self.store, self.run_id, attempt.attempt_id, event, hidden, self.environ)
        except (CloudtrainError, OSError) as error:
            self._write(str(error))

    def _retry(self, attempt: AttemptRecord, status: Status, backend: Backend, plan: Plan, bundle: Bundle) -> None:
        """Start the next attempt."""
        if (
            status.state is State.LOST and status.event != "capacity"
        ):  # with it nothing was started, so nothing was lost
            self._notify(attempt, status, final=False)
        outcome = send.send_attempt(
            self.store, plan, backend, bundle, lambda: self.store.next_attempt(plan, owner=Process.here())
        )
        if isinstance(outcome, send.Unknown):
            self._complain(outcome.error)
        if isinstance(outcome, send.Refused) and not outcome.waiting:
            newest = self.store.attempts(self.run_id)[-1]
            self._diagnose(newest, newest.status, backend)
            self._notify(newest, newest.status, final=True)

    def _cancel(self, backend: Backend, handle: str) -> bool:
        """Ask a platform to end an attempt; False when it did not confirm, which must not keep us from looking at it."""
        try:
            backend.cancel(handle)
        except BackendError as error:
            self._write(error)
            return False
        return True

    def _newest(self) -> tuple[RunRecord, AttemptRecord]:
        return self.store.find(self.run_id), self.store.attempts(self.run_id)[-1]

    def _own_lease(self) -> bool:
        if time.monotonic() - self._leased_at < LEASE_S / 3 and self._leased_at:
            return True
        if not self.store.lease(self.run_id, self.me, LEASE_S):
            return False
        self._leased_at = time.monotonic()
        return True


def _known_end(text: str, attempt_id: str) -> Status | None:
    """Return the status with which the watcher has seen an attempt end; None where it has seen none of this attempt.

    Asking again is not the same: that a machine is lost is known only to a process that has missed it for long enough.
    """
    ended, fields = json.loads(text or "null") or ("", None)
    return Status(**{**fields, "state": State(fields["state"])}) if fields and ended == attempt_id else None


def main() -> int:
    """Look at one run once and send its next attempt: `python -m cloudtrain.runs.watch RUN HOME WATCHER`.

    The watcher of a home starts it, with the environment of the run's shell as JSON on standard input: no other run's
    calls see it. A second line says how the newest attempt ended. Without WATCHER an older cloudtrain has started it, and
    the run is handed to the watcher.
    """
    run_id, home, *rest = sys.argv[1:]
    variables, _, end = sys.stdin.read().partition("\n")
    os.environ.update(json.loads(variables or "{}"))  # in memory only: /proc shows what a process began with
    try:
        store = Store(Path(home))
        owner = Process.parse(rest[0]) if rest else None
        if owner is None:
            watcher.start(store, store.attempts(run_id)[-1].plan)
        elif store.lease(run_id, owner, LEASE_S):  # else another watcher has taken over, and sends it itself
            looks = Watcher(store, run_id, owner)
            status = _known_end(end, store.attempts(run_id)[-1].attempt_id)
            while looks.look(status) is Look.MOVED and store.attempts(run_id)[-1].handle is None:
                status = None
    except CloudtrainError as error:
        print(f"{now()} {run_id}: {error}", file=sys.stderr)  # noqa: T201 - the watcher's own log
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
