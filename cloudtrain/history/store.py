"""Writes the history of all runs: one SQLite file that many processes read and write at once.

Every public method is one transaction. Times are UTC, ISO 8601. A corrupt file is moved aside, never deleted; a file of
a newer cloudtrain is refused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cloudtrain.backends.plan import ATTACHED, AttachedAttempt, Plan
from cloudtrain.events import FINAL, PLATFORM, Event, Row, State, Status
from cloudtrain.history import audit
from cloudtrain.history.database import placeholders
from cloudtrain.history.file import repaired
from cloudtrain.history.leases import Leases
from cloudtrain.history.points import add_points, fill_curves
from cloudtrain.history.records import (
    ATTEMPTS,
    RESUMED,
    AttemptRecord,
    add_attempt,
    add_run,
    attempt_from_row,
    delete_rows,
)
from cloudtrain.history.usage import ADD_USAGE, summarize
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process

_ASKED_TO_STOP = (State.CANCELLED, State.PREEMPTED, State.TIMED_OUT)
_FINAL = tuple(sorted(state.value for state in FINAL))
UNSENT = "unsent"  # the event of an open attempt of which nothing was sent: no machine was reached
UNASKED = "unasked"  # the same of a key's run: nothing is sent before its platforms have answered whether they have it
MOST_REASONS = 500  # of one attempt that are kept, the newest ones
_OF_ATTEMPT = "run_id = (SELECT run_id FROM attempts WHERE attempt_id = ?)"


@repaired
class Store(Leases):
    """The history below a home folder, read and write. Opened on first use; each process and thread needs its own object."""

    # -- submitting ---------------------------------------------------------------------------------------------------

    def intend(
        self,
        plan: Plan,
        *,
        identity: str,
        owner: Process | str,
        key: str | None = None,
        parent: str | None = None,
        provenance: Mapping[str, Any] | None = None,
        event: str = "",
    ) -> bool:
        """Store the intent to submit a run's first attempt, before anything is sent; False when the run exists.

        A run of a `key` that ended before the platform accepted any attempt is replaced: nothing ran under its id.
        """
        with self.database.write() as db:
            if key is not None and not self._is_taken(db, plan.run_id):
                delete_rows(db, plan.run_id)
            moment, marked = now(self.clock), {"event": event} if event else {}
            stored = add_run(db, plan, identity, moment, provenance, key=key, parent=parent) and add_attempt(
                db, plan, moment, owner=str(owner), **marked
            )
        if stored:
            self.database.record_attempt(plan, identity=identity, key=key, parent=parent)
        return stored

    def is_taken(self, run_id: str) -> bool:
        """Return whether a key's run exists, and is open or had an attempt that the platform accepted."""
        with self.database.read() as db:
            return self._is_taken(db, run_id)

    def _is_taken(self, db: sqlite3.Connection, run_id: str) -> bool:
        accepted = "EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = runs.run_id AND handle IS NOT NULL)"
        where = f"run_id = ? AND (state NOT IN ({placeholders(_FINAL)}) OR {accepted})"
        return db.execute(f"SELECT 1 FROM runs WHERE {where}", (run_id, *_FINAL)).fetchone() is not None

    def next_attempt(self, plan: Plan, *, owner: Process, resume: bool = False) -> bool:
        """Store the intent to start attempt N+1; False when another process was first (compare and swap).

        A run that the user cancelled gets no further attempt, unless the user asks to `resume` it.
        """
        with self.database.write() as db:
            newest, state = db.execute(
                "SELECT max(number), state FROM attempts WHERE run_id = ?", (plan.run_id,)
            ).fetchone()
            if newest != plan.attempt - 1 or state not in _FINAL:
                return False
            if not resume and db.execute("SELECT cancel_at FROM runs WHERE run_id = ?", (plan.run_id,)).fetchone()[0]:
                return False
            db.execute(
                "UPDATE runs SET state = ?, exit_code = NULL, reason = '', ended_at = NULL, cancel_at = NULL, backend = ?,"
                " target = ? WHERE run_id = ?",
                (State.QUEUED.value, plan.backend, plan.target, plan.run_id),
            )
            if resume:  # a run that was attached is one of this history from now on
                db.execute(
                    "UPDATE runs SET identity = ?, job = ? WHERE run_id = ? AND substr(identity, 1, ?) = ?",
                    (RESUMED, json.dumps(plan.job), plan.run_id, len(ATTACHED), ATTACHED),
                )
            stored = add_attempt(db, plan, now(self.clock), owner=str(owner))
        if stored:
            self.database.record_attempt(plan, **({"identity": RESUMED} if resume else {}))
        return stored

    def attach(self, plan: Plan, handle: str, created_at: str, uri: str, provenance: Mapping[str, Any]) -> None:
        """Add an attempt of an attached run (submitted elsewhere); existing rows stay."""
        with self.database.write() as db:
            add_run(db, plan, ATTACHED + uri, created_at, provenance, acked_at=now(self.clock))
            stored = _is_attached(db, plan, uri) and add_attempt(db, plan, created_at, handle=handle)
        if stored:
            self.database.record_attempt(plan, identity=ATTACHED + uri, handle=handle)

    def attach_all(self, attempts: Sequence[AttachedAttempt]) -> None:
        """Add the newest attempts of attached runs with their states, many in one transaction; other runs stay.

        The runs are marked: their logs and metrics are not in the history (`is_unread`).
        They are read from their output again, so no journal restores them.
        """
        with self.database.write() as db:
            for each in attempts:
                plan, status = each.plan, each.status
                add_run(db, plan, ATTACHED + each.uri, each.created_at, each.provenance, acked_at=now(self.clock))
                if not _is_attached(db, plan, each.uri):
                    continue
                add_attempt(db, plan, each.created_at, text=plan.to_json(None), handle=each.handle)
                _overwrite(db, plan.attempt_id, status)
                db.execute(
                    "UPDATE runs SET state = ?, exit_code = ?, reason = ?, started_at = ?, ended_at = ? WHERE run_id = ?",
                    (*_status_columns(status)[:5], plan.run_id),
                )
                db.execute("INSERT OR IGNORE INTO unread_runs VALUES (?)", (plan.run_id,))

    def mark_unread(self, run_id: str) -> None:
        """Note that the log of a run that has ended is not read to its end."""
        with self.database.write() as db:
            db.execute("INSERT OR IGNORE INTO unread_runs VALUES (?)", (run_id,))

    def mark_read(self, run_id: str) -> None:
        """Note that the log and the metrics of a run are in the history."""
        with self.database.write() as db:
            db.execute("DELETE FROM unread_runs WHERE run_id = ?", (run_id,))

    def overwrite_status(self, attempt_id: str, status: Status) -> None:
        """Set the status of an attached run's attempt, even over a final one: its own watcher decides, not this history."""
        with self.database.write() as db:
            _overwrite(db, attempt_id, status)
            newest = "SELECT attempt_id FROM attempts a WHERE a.run_id = runs.run_id ORDER BY number DESC LIMIT 1"
            db.execute(
                "UPDATE runs SET state = ?, exit_code = ?, reason = ?, started_at = (SELECT min(started_at) FROM attempts a"
                f" WHERE a.run_id = runs.run_id), ended_at = ? WHERE ({newest}) = ? AND substr(identity, 1, ?) = ?",
                (status.state.value, _code(status), status.reason, status.ended_at, attempt_id, len(ATTACHED),
                 ATTACHED),
            )  # fmt: skip

    def delete(self, run_id: str) -> bool:
        """Delete a run and all that belongs to it; False where it is live. It is not restored from the journal."""
        with self.database.write() as db:
            live = f"SELECT 1 FROM runs WHERE run_id = ? AND state NOT IN ({placeholders(_FINAL)})"
            if db.execute(live, (run_id, *_FINAL)).fetchone():
                return False
            # A sweep keeps the result of its trial: without the run, nothing else says that this one was cancelled.
            cancelled = "SELECT 1 FROM runs WHERE run_id = ? AND state = 'CANCELLED'"
            db.execute(
                f"UPDATE trials SET stopped = 'cancelled' WHERE run_id = ? AND stopped = '' AND EXISTS ({cancelled})",
                (run_id, run_id),
            )
            delete_rows(db, run_id)
            newest = db.execute("SELECT attempt_id FROM attempts ORDER BY rowid DESC LIMIT 1").fetchone()
            self.database.journal.forget(run_id, newest[0] if newest else "")
        return True

    def change_owner(self, attempt_id: str, *, old: str, new: Process | str) -> bool:
        """Change which process may finish a submission; `new=""` lets any. False when the owner is no longer `old`."""
        with self.database.write() as db:
            changed = db.execute(
                "UPDATE attempts SET owner = ? WHERE attempt_id = ? AND owner = ? AND (handle IS NULL OR ? = '')",
                (str(new), attempt_id, old, str(new)),
            )
            return bool(changed.rowcount)

    def accept(self, attempt_id: str, handle: str) -> None:
        """Store the handle of an attempt that the platform has accepted."""
        with self.database.write() as db:
            db.execute(
                f"UPDATE runs SET reason = '' WHERE {_OF_ATTEMPT} AND state NOT IN ({placeholders(_FINAL)})",
                (attempt_id, *_FINAL),
            )
            db.execute(
                "UPDATE attempts SET handle = ?, unanswered_since = NULL, reason = '' WHERE attempt_id = ?",
                (handle, attempt_id),
            )

    def claim_unsent(self, attempt_id: str) -> bool:
        """Remove the mark UNSENT or UNASKED before an attempt is sent; True where it had one."""
        with self.database.write() as db:
            query = "UPDATE attempts SET event = '' WHERE attempt_id = ? AND event IN (?, ?) AND handle IS NULL"
            return bool(db.execute(query, (attempt_id, UNSENT, UNASKED)).rowcount)

    def record_unanswered(self, attempt_id: str, reason: str, *, owner: str = "", event: str = "") -> None:
        """Record that the outcome of a submission is unknown, and since when; with the event UNSENT that nothing was sent.

        `owner` stays the owner where its sender was killed: whether that one got an answer is not known at all.
        """
        moment = now(self.clock)
        with self.database.write() as db:
            db.execute(
                "UPDATE attempts SET tries = tries + 1, tried_at = ?, owner = ?, reason = ?, event = ?,"
                " unanswered_since = CASE ? WHEN '' THEN coalesce(unanswered_since, ?) ELSE unanswered_since END"
                " WHERE attempt_id = ?",
                (moment, owner, reason, event, owner, moment, attempt_id),
            )
            db.execute(
                f"UPDATE runs SET reason = ? WHERE {_OF_ATTEMPT} AND state NOT IN ({placeholders(_FINAL)})",
                (reason, attempt_id, *_FINAL),
            )

    def acknowledge(self, run_id: str) -> None:
        """Record that the user has seen the run's id: a later equal submit is a new run."""
        with self.database.write() as db:
            db.execute("UPDATE runs SET acked_at = coalesce(acked_at, ?) WHERE run_id = ?", (now(self.clock), run_id))

    def unsettled(self) -> list[AttemptRecord]:
        """Return attempts with an open intent, and those whose run id the user has not seen."""
        query = (  # two queries, each with its own index: joined by OR they would read every attempt
            ATTEMPTS + f" WHERE handle IS NULL AND state NOT IN ({placeholders(_FINAL)})"
            f" UNION {ATTEMPTS} WHERE number = 1 AND run_id IN (SELECT run_id FROM runs WHERE acked_at IS NULL)"
            " ORDER BY created_at"
        )
        with self.database.read() as db:
            return [attempt_from_row(row) for row in db.execute(query, _FINAL)]

    # -- watching -----------------------------------------------------------------------------------------------------

    def record(
        self,
        attempt_id: str,
        *,
        status: Status | None = None,
        cursor: str | None = None,
        events: Iterable[Event] = (),
        metrics: Iterable[Row] = (),
    ) -> None:
        """Write status, log cursor, events and metrics of an attempt in one transaction; idempotent.

        A reason that differs from the stored one becomes an event `status` of the node PLATFORM.
        """
        told = [(e, (attempt_id, e.node, e.seq, e.at, e.kind, json.dumps(e.data))) for e in events]
        insert = "INSERT OR IGNORE INTO events (attempt_id, node, seq, at, kind, data) VALUES (?, ?, ?, ?, ?, ?)"
        with self.database.write() as db:
            db.executemany(insert, [row for event, row in told if event.kind != "usage"])
            used = [event for event, row in told if event.kind == "usage" and db.execute(insert, row).rowcount > 0]
            db.executemany(ADD_USAGE, [(*row, attempt_id) for row in summarize(used)])
            add_points(db, attempt_id, list(metrics))
            if cursor is not None:
                db.execute("UPDATE attempts SET cursor = ? WHERE attempt_id = ?", (cursor, attempt_id))
            if status is not None:
                _add_reason(db, attempt_id, status, now(self.clock))
                # A final state is never overwritten.
                db.execute(
                    "UPDATE attempts SET state = ?, exit_code = ?, reason = ?, started_at = coalesce(?, started_at),"
                    " ended_at = ?, url = coalesce(?, url), billable_s = coalesce(?, billable_s), event = ?"
                    f" WHERE attempt_id = ? AND state NOT IN ({placeholders(_FINAL)})",
                    (*_status_columns(status), status.event, attempt_id, *_FINAL),
                )

    def complete_curves(self, attempt_id: str) -> None:
        """Add points to the curves that an older cloudtrain stored alone, because it still ran when the schema changed."""
        stored = "SELECT count(*) FROM metrics WHERE attempt_id = ?1"
        query = f"SELECT ({stored}) != total(points) FROM curves WHERE attempt_id = ?1"
        with self.database.read() as db:  # to count takes long: no writer waits for it where nothing is missing
            differs = db.execute(query, (attempt_id,)).fetchone()[0]
        if differs:
            with self.database.write() as db:
                fill_curves(db, attempt_id)

    def add_event(self, attempt_id: str, kind: str, data: Mapping[str, Any]) -> None:
        """Add an event that happened here, such as the use of a shell, to those of the node PLATFORM."""
        with self.database.write() as db:
            newest = db.execute("SELECT max(seq) FROM events WHERE attempt_id = ? AND node = ?", (attempt_id, PLATFORM))
            seq = (newest.fetchone()[0] or 0) + 1
            row = (attempt_id, PLATFORM, seq, now(self.clock), kind, json.dumps(data))
            db.execute("INSERT INTO events (attempt_id, node, seq, at, kind, data) VALUES (?, ?, ?, ?, ?, ?)", row)

    def keep_images(self, attempt_id: str, images: Mapping[int, str]) -> None:
        """Store which container image each node of an attempt runs; other nodes keep theirs."""
        with self.database.write() as db:
            stored = db.execute("SELECT images FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone()[0]
            merged = json.loads(stored or "{}") | {str(node): image for node, image in images.items()}
            db.execute("UPDATE attempts SET images = ? WHERE attempt_id = ?", (json.dumps(merged), attempt_id))

    def set_status(self, run_id: str, status: Status, attempt: int | None = None) -> None:
        """Set a run's status; a final state is never overwritten, nor that of a run with a later attempt than `attempt`."""
        with self.database.write() as db:
            db.execute(
                "UPDATE runs SET state = ?, exit_code = ?, reason = ?, started_at = coalesce(started_at, ?), ended_at = ?,"
                " url = coalesce(?, url), billable_s = coalesce(?, billable_s)"
                f" WHERE run_id = ? AND state NOT IN ({placeholders(_FINAL)})"
                " AND NOT EXISTS (SELECT 1 FROM attempts WHERE attempts.run_id = runs.run_id AND number > ?)",
                (*_status_columns(status), run_id, *_FINAL, attempt),
            )

    def set_cost(self, run_id: str, usd: float) -> None:
        """Set what a run has cost, once it has ended."""
        with self.database.write() as db:
            db.execute("UPDATE runs SET usd = ? WHERE run_id = ?", (usd, run_id))

    def claim_notice(self, attempt_id: str, event: str) -> bool:
        """Claim the notification of an event for this process; False when another process has claimed it."""
        with self.database.write() as db:
            row = (attempt_id, event, now(self.clock))
            return bool(db.execute("INSERT OR IGNORE INTO notices VALUES (?, ?, ?)", row).rowcount)

    def request_cancel(self, run_id: str) -> dict[str, object]:
        """Record the request to cancel a run, before it is carried out; this acknowledges the run's id too.

        Returns the row of the audit log.
        """
        with self.database.write() as db:
            row = audit.append(self.home, "cancel", run_id)
            db.execute(
                "UPDATE runs SET cancel_at = coalesce(cancel_at, ?), acked_at = coalesce(acked_at, ?) WHERE run_id = ?",
                (now(self.clock), now(self.clock), run_id),
            )
        return row


def _add_reason(db: sqlite3.Connection, attempt_id: str, status: Status, moment: str) -> None:
    """Add the event of a changed reason, unless the attempt has ended or ends with it; delete the oldest of too many."""
    if status.state.final:
        return
    newest = db.execute("SELECT max(seq) FROM events WHERE attempt_id = ? AND node = ?", (attempt_id, PLATFORM))
    seq = (newest.fetchone()[0] or 0) + 1
    data = json.dumps({"state": status.state.value, "reason": status.reason})
    db.execute(
        "INSERT INTO events (attempt_id, node, seq, at, kind, data) SELECT attempt_id, ?, ?, ?, 'status', ? FROM attempts"
        f" WHERE attempt_id = ? AND reason != ? AND state NOT IN ({placeholders(_FINAL)})",
        (PLATFORM, seq, moment, data, attempt_id, status.reason, *_FINAL),
    )
    old = (attempt_id, PLATFORM, seq - MOST_REASONS)
    db.execute("DELETE FROM events WHERE attempt_id = ? AND node = ? AND seq <= ? AND kind = 'status'", old)


def _is_attached(db: sqlite3.Connection, plan: Plan, uri: str) -> bool:
    """Return whether the run of a plan is the one that is attached from there."""
    query = "SELECT 1 FROM runs WHERE run_id = ? AND identity = ?"
    return db.execute(query, (plan.run_id, ATTACHED + uri)).fetchone() is not None


def _overwrite(db: sqlite3.Connection, attempt_id: str, status: Status) -> None:
    """Set the status of an attempt, even over a final one."""
    columns = "state = ?, exit_code = ?, reason = ?, started_at = ?, ended_at = ?, url = ?, billable_s = ?"
    db.execute(f"UPDATE attempts SET {columns} WHERE attempt_id = ?", (*_status_columns(status), attempt_id))


def _code(status: Status) -> int | None:
    """Return the script's own exit code: of an attempt that was asked to stop the code is the launcher's, or a signal's."""
    return None if status.state in _ASKED_TO_STOP else status.exit_code


def _status_columns(status: Status) -> tuple[Any, ...]:
    times = (status.started_at, status.ended_at)
    return (status.state.value, _code(status), status.reason, *times, status.url, status.billable_s)
