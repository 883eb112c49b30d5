"""The history of all runs: one SQLite file that many processes read and write at once.

Only submitter, run and watch write. Every public method is one transaction. Times are UTC, ISO 8601. A corrupt file is
moved aside, never deleted; a file of a newer cloudtrain is refused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from cloudtrain.backends.api import ATTACHED, Plan
from cloudtrain.events import FINAL, Event, State, Status
from cloudtrain.history.queries import History
from cloudtrain.history.records import ATTEMPTS, AttemptRecord, attempt_of, marks
from cloudtrain.nodes.process import Process

_FINAL = tuple(sorted(state.value for state in FINAL))
_OF_ATTEMPT = "run_id = (SELECT run_id FROM attempts WHERE attempt_id = ?)"


def now() -> str:
    """Return this moment as the store writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Store(History):
    """The history below a home folder, read and written; opened on first use, one object for one process and thread."""

    # -- submitting ---------------------------------------------------------------------------------------------------

    def intend(
        self,
        plan: Plan,
        *,
        identity: str,
        owner: Process,
        key: str | None = None,
        parent: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write down the wish to submit a run's first attempt, before anything is sent; False when the run exists."""
        with self.database.write() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO runs (run_id, name, backend, target, key, parent, identity, job, created_at, state)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    plan.run_id,
                    plan.job.get("name", ""),
                    plan.backend,
                    plan.target,
                    key,
                    parent,
                    identity,
                    json.dumps(plan.job),
                    now(),
                    State.QUEUED.value,
                ),
            ).rowcount
            if added and provenance:
                db.execute("INSERT INTO provenance VALUES (?, ?)", (plan.run_id, json.dumps(provenance)))
            return bool(added) and self._add_attempt(db, plan, owner)

    def next_attempt(self, plan: Plan, *, owner: Process, resume: bool = False) -> bool:
        """Write down the wish to start attempt N+1; False when another process was first (compare and swap).

        A run that a person asked to cancel gets no further attempt, unless a person asks to `resume` it.
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
                "UPDATE runs SET state = ?, exit_code = NULL, reason = '', ended_at = NULL, cancel_at = NULL WHERE run_id = ?",
                (State.QUEUED.value, plan.run_id),
            )
            return self._add_attempt(db, plan, owner)

    def _add_attempt(self, db: sqlite3.Connection, plan: Plan, owner: Process) -> bool:
        return bool(
            db.execute(
                "INSERT OR IGNORE INTO attempts (attempt_id, run_id, number, plan, owner, created_at, state)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (plan.attempt_id, plan.run_id, plan.attempt, plan.to_json(), str(owner), now(), State.QUEUED.value),
            ).rowcount
        )

    def attach(self, plan: Plan, handle: str, created_at: str, uri: str, provenance: Mapping[str, Any]) -> None:
        """Write down an attempt of a run that was submitted elsewhere; what is known of it stays."""
        run_id, job = plan.run_id, json.dumps(plan.job)
        with self.database.write() as db:
            about = (plan.job.get("name", ""), plan.backend, plan.target, ATTACHED + uri, job)
            added = db.execute(
                "INSERT OR IGNORE INTO runs (run_id, name, backend, target, identity, job, created_at, acked_at, state)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (run_id, *about, created_at, now(), State.QUEUED.value),
            ).rowcount
            if added:
                db.execute("INSERT INTO provenance VALUES (?, ?)", (run_id, json.dumps(provenance)))
            db.execute(
                "INSERT OR IGNORE INTO attempts (attempt_id, run_id, number, plan, handle, owner, created_at, state)"
                " SELECT ?, run_id, ?, ?, ?, '', ?, ? FROM runs WHERE run_id = ? AND identity = ?",
                (plan.attempt_id, plan.attempt, plan.to_json(), handle, created_at, State.QUEUED.value, run_id,
                 ATTACHED + uri),
            )  # fmt: skip

    def tell(self, attempt_id: str, status: Status) -> None:
        """Write how an attempt of an attached run stands: who runs it knows better than what was heard before."""
        with self.database.write() as db:
            db.execute(
                "UPDATE attempts SET state = ?, exit_code = ?, reason = ?, started_at = ?, ended_at = ?, url = ?,"
                " billable_s = ? WHERE attempt_id = ?",
                (*_columns(status), attempt_id),
            )
            newest = "SELECT attempt_id FROM attempts a WHERE a.run_id = runs.run_id ORDER BY number DESC LIMIT 1"
            db.execute(
                "UPDATE runs SET state = ?, exit_code = ?, reason = ?, started_at = (SELECT min(started_at) FROM attempts a"
                f" WHERE a.run_id = runs.run_id), ended_at = ? WHERE ({newest}) = ? AND substr(identity, 1, ?) = ?",
                (status.state.value, status.exit_code, status.reason, status.ended_at, attempt_id, len(ATTACHED),
                 ATTACHED),
            )  # fmt: skip

    def claim(self, attempt_id: str, *, of: str, by: Process | str) -> bool:
        """Take over an intent whose owner is gone, or give it back to it; False when somebody else was first."""
        with self.database.write() as db:
            changed = db.execute(
                "UPDATE attempts SET owner = ? WHERE attempt_id = ? AND owner = ?", (str(by), attempt_id, of)
            )
            return bool(changed.rowcount)

    def accept(self, attempt_id: str, handle: str) -> None:
        """Write down that the platform has accepted an attempt."""
        with self.database.write() as db:
            db.execute(
                f"UPDATE runs SET reason = '' WHERE {_OF_ATTEMPT} AND state NOT IN ({marks(_FINAL)})",
                (attempt_id, *_FINAL),
            )
            db.execute(
                "UPDATE attempts SET handle = ?, unanswered_since = NULL, reason = '' WHERE attempt_id = ?",
                (handle, attempt_id),
            )

    def unanswered(self, attempt_id: str, reason: str, *, owner: str = "") -> None:
        """Write down that nobody knows what came of a submission, and since when; `owner` is who may go on with it."""
        moment = now()
        with self.database.write() as db:
            db.execute(
                "UPDATE attempts SET tries = tries + 1, tried_at = ?, unanswered_since = coalesce(unanswered_since, ?),"
                " owner = ?, reason = ? WHERE attempt_id = ?",
                (moment, moment, owner, reason, attempt_id),
            )
            db.execute(
                f"UPDATE runs SET reason = ? WHERE {_OF_ATTEMPT} AND state NOT IN ({marks(_FINAL)})",
                (reason, attempt_id, *_FINAL),
            )

    def acknowledge(self, run_id: str) -> None:
        """Write down that the person was told the run's id: a later equal submit is a new run."""
        with self.database.write() as db:
            db.execute("UPDATE runs SET acked_at = coalesce(acked_at, ?) WHERE run_id = ?", (now(), run_id))

    def unsettled(self) -> list[AttemptRecord]:
        """Return the attempts that were wished for and whose submit was never seen to its end."""
        query = (  # two questions, each with an index of its own: joined by OR they would read every attempt
            ATTEMPTS + f" WHERE handle IS NULL AND state NOT IN ({marks(_FINAL)})"
            f" UNION {ATTEMPTS} WHERE number = 1 AND run_id IN (SELECT run_id FROM runs WHERE acked_at IS NULL)"
            " ORDER BY created_at"
        )
        with self.database.read() as db:
            return [attempt_of(row) for row in db.execute(query, _FINAL)]

    # -- watching -----------------------------------------------------------------------------------------------------

    def record(
        self,
        attempt_id: str,
        *,
        status: Status | None = None,
        cursor: str | None = None,
        events: Iterable[Event] = (),
        metrics: Iterable[tuple[Event, int, str, float]] = (),
    ) -> None:
        """Write what was seen of an attempt, all or nothing; seeing the same lines again changes nothing."""
        with self.database.write() as db:
            db.executemany(
                "INSERT OR IGNORE INTO events (attempt_id, node, seq, at, kind, data) VALUES (?, ?, ?, ?, ?, ?)",
                [(attempt_id, e.node, e.seq, e.at, e.kind, json.dumps(e.data)) for e in events],
            )
            db.executemany(
                "INSERT OR IGNORE INTO metrics (attempt_id, node, seq, at, step, name, value) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(attempt_id, e.node, e.seq, e.at, step, name, value) for e, step, name, value in metrics],
            )
            if cursor is not None:
                db.execute("UPDATE attempts SET cursor = ? WHERE attempt_id = ?", (cursor, attempt_id))
            if status is not None:
                # A final state is history: nothing that is seen later rewrites it.
                db.execute(
                    "UPDATE attempts SET state = ?, exit_code = ?, reason = ?, started_at = coalesce(?, started_at),"
                    " ended_at = ?, url = coalesce(?, url), billable_s = coalesce(?, billable_s), event = ?"
                    f" WHERE attempt_id = ? AND state NOT IN ({marks(_FINAL)})",
                    (*_columns(status), status.event, attempt_id, *_FINAL),
                )

    def keep_images(self, attempt_id: str, images: Mapping[int, str]) -> None:
        """Write which container image each node of an attempt runs; what is known of other nodes stays."""
        with self.database.write() as db:
            known = db.execute("SELECT images FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone()[0]
            found = json.loads(known or "{}") | {str(node): image for node, image in images.items()}
            db.execute("UPDATE attempts SET images = ? WHERE attempt_id = ?", (json.dumps(found), attempt_id))

    def set_status(self, run_id: str, status: Status) -> None:
        """Write a run's own state; a final state is never rewritten."""
        with self.database.write() as db:
            db.execute(
                "UPDATE runs SET state = ?, exit_code = ?, reason = ?, started_at = coalesce(started_at, ?), ended_at = ?,"
                " url = coalesce(?, url), billable_s = coalesce(?, billable_s)"
                f" WHERE run_id = ? AND state NOT IN ({marks(_FINAL)})",
                (*_columns(status), run_id, *_FINAL),
            )

    def claim_notice(self, attempt_id: str, event: str) -> bool:
        """Take it upon this process to tell people of an event; False when another one has done so."""
        with self.database.write() as db:
            row = (attempt_id, event, now())
            return bool(db.execute("INSERT OR IGNORE INTO notices VALUES (?, ?, ?)", row).rowcount)

    def request_cancel(self, run_id: str) -> None:
        """Write down that the run is to be cancelled, before that is acted on; who cancels it knows its id."""
        with self.database.write() as db:
            db.execute(
                "UPDATE runs SET cancel_at = coalesce(cancel_at, ?), acked_at = coalesce(acked_at, ?) WHERE run_id = ?",
                (now(), now(), run_id),
            )

    def lease(self, run_id: str, owner: Process, ttl_s: float) -> bool:
        """Take or renew the right to watch a run; False while another living process holds it."""
        moment = datetime.now(UTC).timestamp()
        with self.database.write() as db:
            row = db.execute("SELECT owner, expires_at FROM leases WHERE run_id = ?", (run_id,)).fetchone()
            if row and row[0] != str(owner) and _held(row[0], row[1], moment):
                return False
            db.execute(
                "INSERT OR REPLACE INTO leases (run_id, owner, expires_at) VALUES (?, ?, ?)",
                (run_id, str(owner), moment + ttl_s),
            )
            return True

    def release(self, run_id: str, owner: Process) -> None:
        """Give the right to watch back; nothing happens when somebody else holds it."""
        with self.database.write() as db:
            db.execute("DELETE FROM leases WHERE run_id = ? AND owner = ?", (run_id, str(owner)))

    def watched(self, run_id: str) -> bool:
        """Return whether a living process watches the run."""
        with self.database.read() as db:
            row = db.execute("SELECT owner, expires_at FROM leases WHERE run_id = ?", (run_id,)).fetchone()
        return bool(row) and _held(row[0], row[1], datetime.now(UTC).timestamp())


def _held(owner: str, expires_at: float, moment: float) -> bool:
    process = Process.parse(owner)
    return expires_at > moment and not (process and process.alive is False)


def _columns(status: Status) -> tuple[Any, ...]:
    times = (status.started_at, status.ended_at)
    return (status.state.value, status.exit_code, status.reason, *times, status.url, status.billable_s)
