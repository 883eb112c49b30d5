"""The history of all runs: one SQLite file that many processes read and write at once.

Only submitter, run and watch write. Every public method is one transaction. Times are UTC, ISO 8601. A corrupt file is
moved aside, never deleted; a file of a newer cloudtrain is refused.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backend import ATTACHED, Plan
from cloudtrain.database import Database
from cloudtrain.errors import UnknownRun
from cloudtrain.events import Event
from cloudtrain.process import Process
from cloudtrain.state import FINAL, State, Status

if TYPE_CHECKING:
    from cloudtrain.curves import Curves

_FINAL = tuple(sorted(state.value for state in FINAL))


@dataclass(frozen=True)
class RunRecord:
    """A row of `runs`."""

    run_id: str
    name: str
    backend: str
    target: str
    key: str | None
    parent: str | None
    identity: str
    job: Mapping[str, Any]
    created_at: str
    acknowledged: bool
    cancel_requested: bool
    status: Status

    @property
    def attached(self) -> str | None:
        """Where a run that was submitted elsewhere is read from, None for one of this store's own."""
        return self.identity.removeprefix(ATTACHED) if self.identity.startswith(ATTACHED) else None


@dataclass(frozen=True)
class AttemptRecord:
    """A row of `attempts`; `handle` is None between intent and acceptance."""

    attempt_id: str
    run_id: str
    number: int
    plan: Plan
    handle: str | None
    owner: str
    cursor: str | None
    created_at: str
    status: Status


@dataclass(frozen=True)
class MetricRow:
    """One point of a curve."""

    attempt: int
    node: int
    seq: int
    at: str
    name: str
    step: int
    value: float


def now() -> str:
    """Return this moment as the store writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Store:
    """The history below a home folder; opened on first use, one object for one process and thread."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.database = Database(home)

    @cached_property
    def curves(self) -> Curves:
        """The curves of all runs; a submit draws none."""
        from cloudtrain.curves import Curves

        return Curves(self.database)

    @property
    def warnings(self) -> list[str]:
        """What a person should be told, such as a damaged file that was moved aside."""
        return self.database.warnings

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

    def claim(self, attempt_id: str, *, of: str, by: Process) -> bool:
        """Take over an intent whose owner is dead; False when somebody else was first."""
        with self.database.write() as db:
            changed = db.execute(
                "UPDATE attempts SET owner = ? WHERE attempt_id = ? AND owner = ?", (str(by), attempt_id, of)
            )
            return bool(changed.rowcount)

    def accept(self, attempt_id: str, handle: str) -> None:
        """Write down that the platform has accepted an attempt."""
        with self.database.write() as db:
            db.execute("UPDATE attempts SET handle = ? WHERE attempt_id = ?", (handle, attempt_id))

    def acknowledge(self, run_id: str) -> None:
        """Write down that the person was told the run's id: a later equal submit is a new run."""
        with self.database.write() as db:
            db.execute("UPDATE runs SET acked_at = coalesce(acked_at, ?) WHERE run_id = ?", (now(), run_id))

    def unsettled(self) -> list[AttemptRecord]:
        """Return the attempts that were wished for and whose submit was never seen to its end."""
        query = (  # two questions, each with an index of its own: joined by OR they would read every attempt
            _ATTEMPTS + f" WHERE handle IS NULL AND state NOT IN ({_marks(_FINAL)})"
            f" UNION {_ATTEMPTS} WHERE number = 1 AND run_id IN (SELECT run_id FROM runs WHERE acked_at IS NULL)"
            " ORDER BY created_at"
        )
        with self.database.read() as db:
            return [_attempt(row) for row in db.execute(query, _FINAL)]

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
                    " ended_at = ?, url = coalesce(?, url), billable_s = coalesce(?, billable_s)"
                    f" WHERE attempt_id = ? AND state NOT IN ({_marks(_FINAL)})",
                    (*_columns(status), attempt_id, *_FINAL),
                )

    def set_status(self, run_id: str, status: Status) -> None:
        """Write a run's own state; a final state is never rewritten."""
        with self.database.write() as db:
            db.execute(
                "UPDATE runs SET state = ?, exit_code = ?, reason = ?, started_at = coalesce(started_at, ?), ended_at = ?,"
                " url = coalesce(?, url), billable_s = coalesce(?, billable_s)"
                f" WHERE run_id = ? AND state NOT IN ({_marks(_FINAL)})",
                (*_columns(status), run_id, *_FINAL),
            )

    def claim_notice(self, attempt_id: str, event: str) -> bool:
        """Take it upon this process to tell people of an event; False when another one has done so."""
        with self.database.write() as db:
            row = (attempt_id, event, now())
            return bool(db.execute("INSERT OR IGNORE INTO notices VALUES (?, ?, ?)", row).rowcount)

    def request_cancel(self, run_id: str) -> None:
        """Write down the wish to cancel, before it is acted on."""
        with self.database.write() as db:
            db.execute("UPDATE runs SET cancel_at = coalesce(cancel_at, ?) WHERE run_id = ?", (now(), run_id))

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

    # -- reading ------------------------------------------------------------------------------------------------------

    def find(self, text: str | None) -> RunRecord:
        """Return the run of an id or a unique prefix, or the newest one for None; raises UnknownRun."""
        with self.database.read() as db:
            if text is None:
                rows = db.execute(_RUNS + " ORDER BY created_at DESC, run_id DESC LIMIT 1").fetchall()
            else:
                rows = (
                    db.execute(_RUNS + " WHERE run_id = ?", (text,)).fetchall()
                    or db.execute(
                        _RUNS + " WHERE substr(run_id, 1, ?) = ? ORDER BY created_at DESC LIMIT 6", (len(text), text)
                    ).fetchall()
                )
        if not rows:
            raise UnknownRun(
                "there are no runs yet" if text is None else f"no run has the id or prefix {text!r}",
                "cloudtrain submit starts one" if text is None else "cloudtrain ls shows them",
            )
        if len(rows) > 1:
            raise UnknownRun(f"several runs begin with {text!r}", "one of " + ", ".join(row["run_id"] for row in rows))
        return _run(rows[0])

    def get(self, run_id: str) -> RunRecord | None:
        """Return the run of an exact id, or None."""
        with self.database.read() as db:
            row = db.execute(_RUNS + " WHERE run_id = ?", (run_id,)).fetchone()
        return _run(row) if row else None

    def runs(self, *, limit: int = 50, states: Sequence[State] = (), name: str | None = None) -> list[RunRecord]:
        """Return the newest runs first."""
        order = "ORDER BY created_at DESC, run_id DESC LIMIT ?"
        parts, values = [], []
        for state in states or (None,):  # the newest of each state: an index has them in this order
            wheres = {"state": state and state.value, "name": name}
            given = {column: value for column, value in wheres.items() if value}
            where = " AND ".join(f"{column} = ?" for column in given) or "1"
            parts.append(f"SELECT * FROM ({_RUNS} WHERE {where} {order})")
            values += [*given.values(), limit]
        # Sorted again only where there are several: for one, ten thousand whole rows would go through a sorter.
        query, values = (
            (f"{' UNION ALL '.join(parts)} {order}", [*values, limit]) if len(parts) > 1 else (parts[0], values)
        )
        with self.database.read() as db:
            return [_run(row) for row in db.execute(query, values)]

    def page(
        self,
        *,
        words: str = "",
        states: Sequence[State] = (),
        target: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> tuple[list[RunRecord], int]:
        """Return a page of the runs, the newest first, and how many there are in all; `words` stand in their ids."""
        wheres, values = ["1"], []
        if words:
            wheres.append("run_id LIKE ? ESCAPE '!'")
            values.append(f"%{''.join('!' + letter if letter in '%_!' else letter for letter in words)}%")
        if states:
            wheres.append(f"state IN ({_marks(states)})")
            values += [state.value for state in states]
        if target is not None:
            wheres.append("target = ?")
            values.append(target)
        where = " AND ".join(wheres)
        with self.database.read() as db:
            count = db.execute(f"SELECT count(*) FROM runs WHERE {where}", values).fetchone()[0]
            # The ids first: an offset would read whole rows, with their jobs, only to skip them.
            ids = (
                f"SELECT run_id FROM runs WHERE {where} ORDER BY created_at DESC, run_id DESC LIMIT {int(limit)}"
                f" OFFSET {int(offset)}"
            )
            rows = db.execute(f"{_RUNS} WHERE run_id IN ({ids}) ORDER BY created_at DESC, run_id DESC", values)
            return [_run(row) for row in rows], count

    def targets(self) -> list[str]:
        """Return the targets of all runs."""
        with self.database.read() as db:
            return [row[0] for row in db.execute("SELECT DISTINCT target FROM runs ORDER BY target")]

    def attempts(self, run_id: str) -> list[AttemptRecord]:
        """Return a run's attempts, the oldest first."""
        with self.database.read() as db:
            return [_attempt(row) for row in db.execute(_ATTEMPTS + " WHERE run_id = ? ORDER BY number", (run_id,))]

    def metrics(self, run_id: str, name: str | None = None) -> list[MetricRow]:
        """Return the points of a run's curves in the order in which they were emitted."""
        query = (
            "SELECT a.number, m.node, m.seq, m.at, m.name, m.step, m.value FROM metrics m JOIN attempts a USING (attempt_id)"
            " WHERE a.run_id = ?" + (" AND m.name = ?" if name else "") + " ORDER BY a.number, m.node, m.seq, m.name"
        )
        with self.database.read() as db:
            rows = db.execute(query, (run_id, name) if name else (run_id,))
            return [MetricRow(a, n, q, at, m, step, math.nan if v is None else v) for a, n, q, at, m, step, v in rows]

    def events(self, run_id: str, kind: str | None = None) -> list[Event]:
        """Return a run's events other than metrics, in order on each node."""
        query = (
            "SELECT e.attempt_id, e.node, e.seq, e.at, e.kind, e.data FROM events e JOIN attempts a USING (attempt_id)"
            " WHERE a.run_id = ?" + (" AND e.kind = ?" if kind else "") + " ORDER BY a.number, e.at, e.node, e.seq"
        )
        with self.database.read() as db:
            rows = db.execute(query, (run_id, kind) if kind else (run_id,))
            return [Event(row[0], row[1], row[2], row[3], row[4], json.loads(row[5])) for row in rows]

    def latest(self, attempt_id: str, node: int, kind: str) -> Event | None:
        """Return the newest event of a kind on one node, found from the end."""
        query = (
            "SELECT attempt_id, node, seq, at, kind, data FROM events WHERE attempt_id = ? AND node = ? AND kind = ?"
            " ORDER BY seq DESC LIMIT 1"
        )
        with self.database.read() as db:
            row = db.execute(query, (attempt_id, node, kind)).fetchone()
        return Event(row[0], row[1], row[2], row[3], row[4], json.loads(row[5])) if row else None

    def provenance(self, run_id: str) -> dict[str, Any]:
        """Return where a run came from (see cloudtrain.provenance); empty for one of an older cloudtrain."""
        with self.database.read() as db:
            row = db.execute("SELECT data FROM provenance WHERE run_id = ?", (run_id,)).fetchone()
        return dict(json.loads(row[0])) if row else {}

    def names(self) -> list[str]:
        """Return all run ids, the newest first (shell completion)."""
        with self.database.read() as db:
            return [row[0] for row in db.execute("SELECT run_id FROM runs ORDER BY created_at DESC LIMIT 1000")]


_RUNS = (
    "SELECT run_id, name, backend, target, key, parent, identity, job, created_at, acked_at, cancel_at, state, exit_code,"
    " reason, started_at, ended_at, url, billable_s FROM runs"
)
_STATES = {state.value: state for state in State}
_ATTEMPTS = "SELECT attempts.* FROM attempts"


class _Late(Mapping[str, Any]):
    """JSON of a mapping that is parsed when something is asked of it: a list of runs asks nothing of their jobs."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._parsed: dict[str, Any] | None = None

    @property
    def _data(self) -> dict[str, Any]:
        if self._parsed is None:
            self._parsed = dict(json.loads(self._text))
        return self._parsed

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return repr(self._data)


def _marks(items: Sequence[object]) -> str:
    return ", ".join("?" for _ in items)


def _held(owner: str, expires_at: float, moment: float) -> bool:
    process = Process.parse(owner)
    return expires_at > moment and not (process and process.alive is False)


def _columns(status: Status) -> tuple[Any, ...]:
    times = (status.started_at, status.ended_at)
    return (status.state.value, status.exit_code, status.reason, *times, status.url, status.billable_s)


def _status(row: sqlite3.Row) -> Status:
    names = ("exit_code", "reason", "started_at", "ended_at", "url", "billable_s")
    return Status(_STATES[row["state"]], *(row[name] for name in names))


def _run(row: sqlite3.Row) -> RunRecord:
    # By position: asking ten thousand rows for seventeen names each took a quarter of the time of a list.
    (run_id, name, backend, target, key, parent, identity, job, created_at, acked_at, cancel_at, state, exit_code, reason,
     started_at, ended_at, url, billable_s) = row  # fmt: skip
    status = Status(_STATES[state], exit_code, reason, started_at, ended_at, url, billable_s)
    known, asked = acked_at is not None, cancel_at is not None
    return RunRecord(
        run_id, name, backend, target, key, parent, identity, _Late(job), created_at, known, asked, status
    )  # fmt: skip


def _attempt(row: sqlite3.Row) -> AttemptRecord:
    return AttemptRecord(
        attempt_id=row["attempt_id"],
        run_id=row["run_id"],
        number=row["number"],
        plan=Plan.from_json(row["plan"]),
        handle=row["handle"],
        owner=row["owner"],
        cursor=row["cursor"],
        created_at=row["created_at"],
        status=_status(row),
    )
