"""Read-only queries of the history: runs, attempts, metrics, events. Every query is one transaction."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.plan import ATTACHED
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import UnknownRun
from cloudtrain.events import PLATFORM, Event, State
from cloudtrain.history import repair
from cloudtrain.history.columns import TOOK
from cloudtrain.history.database import Database, placeholders
from cloudtrain.history.file import repaired
from cloudtrain.history.records import (
    ATTEMPTS,
    RUNS,
    AttemptRecord,
    MetricRow,
    RunRecord,
    attempt_from_row,
    run_from_row,
)

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend
    from cloudtrain.history.curves import Curves

_BEGAN = (
    "(state != 'FAILED' OR EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = runs.run_id AND a.handle IS NOT NULL))"
)


@repaired
class History:
    """The history below a home folder, read-only. Opened on first use; each process and thread needs its own object."""

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self.home, self.clock = home, clock
        self.database = Database(home, clock)

    @cached_property
    def curves(self) -> Curves:
        """Queries for metric curves; imported late, a submit needs none."""
        from cloudtrain.history.curves import Curves

        return Curves(self.database)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user, such as a damaged file that was moved aside."""
        return self.database.warnings

    def check(self) -> None:
        """Check the whole file, repair it where it is damaged, and ask the platforms for lost runs; blocking. See `warnings`."""
        self.names()
        if not self.database.read_only:
            self.database.repair(LookupError("check"))
            if text := self.database.search():
                self.warnings.append(text)

    def find_labelled(self, backend: Backend, options: Mapping[str, Any]) -> int:
        """Add the runs of this home that a backend's platform lists and the history lacks, and return how many; blocking.

        Raises BackendError.
        """
        with self.database.read() as db:
            found = list(repair.labelled(db, self.home, backend, options))
        return self.database.add_found(found)

    def find(self, text: str | None) -> RunRecord:
        """Return the run with an id, a short name (`lm-12`) or a unique prefix of an id; raises UnknownRun.

        For None it is the newest run, but one that its platform refused only where there is no other.
        """
        with self.database.read() as db:
            if text is None:
                order = "ORDER BY created_at DESC, run_id DESC LIMIT 1"
                rows = (
                    db.execute(f"{RUNS} WHERE {_BEGAN} {order}").fetchall() or db.execute(f"{RUNS} {order}").fetchall()
                )
            else:
                rows = (
                    db.execute(RUNS + " WHERE run_id = ?", (text,)).fetchall()
                    or _by_number(db, text)
                    or db.execute(
                        RUNS + " WHERE substr(run_id, 1, ?) = ? ORDER BY created_at DESC LIMIT 6", (len(text), text)
                    ).fetchall()
                )
        if not rows and text and (self.home / "runs" / text).is_dir() and self.database.repair(UnknownRun(text)):
            return self.find(text)
        if not rows:
            raise UnknownRun(
                "there are no runs yet" if text is None else f"no run has the id or prefix {text!r}",
                "cloudtrain submit starts one" if text is None else "cloudtrain ls shows them",
            )
        if len(rows) > 1:
            raise UnknownRun(f"several runs start with {text!r}", "one of " + ", ".join(row["run_id"] for row in rows))
        return _parsed(run_from_row(rows[0]))

    def get(self, run_id: str) -> RunRecord | None:
        """Return the run with this exact id, or None."""
        with self.database.read() as db:
            row = db.execute(RUNS + " WHERE run_id = ?", (run_id,)).fetchone()
        return _parsed(run_from_row(row)) if row else None

    def runs(self, *, limit: int = 50, states: Sequence[State] = (), name: str | None = None) -> list[RunRecord]:
        """List runs, the newest first."""
        order = "ORDER BY created_at DESC, run_id DESC LIMIT ?"
        parts, values = [], []
        for state in states or (None,):  # the newest of each state: an index is in this order
            wheres = {"state": state and state.value, "name": name}
            filters = {column: value for column, value in wheres.items() if value}
            where = " AND ".join(f"{column} = ?" for column in filters) or "1"
            parts.append(f"SELECT * FROM ({RUNS} WHERE {where} {order})")
            values += [*filters.values(), limit]
        # Sort only where several states are merged: sorting ten thousand whole rows is slow.
        query, values = (
            (f"{' UNION ALL '.join(parts)} {order}", [*values, limit]) if len(parts) > 1 else (parts[0], values)
        )
        with self.database.read() as db:
            return [run_from_row(row) for row in db.execute(query, values)]

    def select(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        """Return the rows of a query of another module (table.py, marks.py)."""
        with self.database.read() as db:
            return db.execute(query, tuple(values)).fetchall()

    def attempts(self, run_id: str) -> list[AttemptRecord]:
        """Return a run's attempts, the oldest first."""
        with self.database.read() as db:
            return [
                attempt_from_row(row) for row in db.execute(ATTEMPTS + " WHERE run_id = ? ORDER BY number", (run_id,))
            ]

    def attempts_since(self, when: str, until: str = "") -> Iterator[AttemptRecord]:
        """Yield the attempts of all runs that were started since a time (ISO 8601, UTC), the oldest first.

        With `until` only those that were started before it.
        """
        with self.database.read() as db:
            query = ATTEMPTS + " WHERE created_at >= ? AND (? = '' OR created_at < ?) ORDER BY created_at, attempt_id"
            yield from map(attempt_from_row, db.execute(query, (when, until, until)))

    def progress(self, attempt_id: str) -> tuple[State, str | None]:
        """Return an attempt's state, and the cursor of the last line of its log that is in the history."""
        with self.database.read() as db:
            state, cursor = db.execute(
                "SELECT state, cursor FROM attempts WHERE attempt_id = ?", (attempt_id,)
            ).fetchone()
        return State(state), cursor

    def took_s(self, run_ids: Sequence[str]) -> dict[str, float]:
        """Return for how many seconds the attempts of each run ran, those until now included; without those not begun."""
        query = f"SELECT run_id, {TOOK} FROM runs WHERE run_id IN ({placeholders(run_ids)})"
        with self.database.read() as db:
            return {run_id: took for run_id, took in db.execute(query, tuple(run_ids)) if took is not None}

    def metrics(self, run_id: str, name: str | None = None, rank: int | None = 0) -> list[MetricRow]:
        """Return the metric points of a run in the order in which they were logged; of all ranks for None.

        For rank 0, a metric that it has not logged is that of the lowest rank that has.
        """
        curves = set(self.curves.owners(run_id, rank))
        query = (
            "SELECT a.number, m.node, m.seq, m.at, m.name, m.step, m.value, m.rank, m.epoch FROM metrics m"
            " JOIN attempts a USING (attempt_id) WHERE a.run_id = ?"
            + (" AND m.name = ?" if name else "")
            + " ORDER BY a.number, m.node, m.seq, m.name"
        )
        with self.database.read() as db:
            rows = db.execute(query, (run_id, name) if name else (run_id,))
            return [
                MetricRow(number, node, seq, at, metric, step, math.nan if value is None else value, of, epoch)
                for number, node, seq, at, metric, step, value, of, epoch in rows
                if (number, metric, of) in curves
            ]

    def events(self, run_id: str, kind: str | None = None) -> list[Event]:
        """Return a run's events in order on each node; without a kind all but metrics and logged objects (media)."""
        query = (
            "SELECT e.attempt_id, e.node, e.seq, e.at, e.kind, e.data FROM events e JOIN attempts a USING (attempt_id)"
            f" WHERE a.run_id = ? AND e.kind {'=' if kind else '!='} ? ORDER BY a.number, e.at, e.node, e.seq"
        )
        with self.database.read() as db:
            rows = db.execute(query, (run_id, kind or "media"))
            return [Event(row[0], row[1], row[2], row[3], row[4], json.loads(row[5])) for row in rows]

    def count_events(self, run_id: str, kind: str) -> int:
        """Return how many events of a kind a run has."""
        query = "SELECT count(*) FROM attempts a JOIN events e USING (attempt_id) WHERE a.run_id = ? AND e.kind = ?"
        with self.database.read() as db:
            return int(db.execute(query, (run_id, kind)).fetchone()[0])

    def reason_since(self, record: RunRecord) -> str | None:
        """Return since when a run has its reason, as far as its newest attempt's platform gave that reason."""
        query = (
            "SELECT e.at, e.data FROM attempts a JOIN events e ON e.attempt_id = a.attempt_id AND e.node = ?"
            " WHERE a.run_id = ? AND e.kind = 'status' ORDER BY a.number DESC, e.seq DESC LIMIT 1"
        )
        with self.database.read() as db:
            row = db.execute(query, (PLATFORM, record.run_id)).fetchone()
        return str(row[0]) if row and json.loads(row[1])["reason"] == record.status.reason else None

    def ends_of_nodes(self, since: str, words: Sequence[str]) -> list[tuple[AttemptRecord, list[Event]]]:
        """Return the attempts of a time whose reason, results or verdict have one of these words, and such events.

        The oldest first. A platform may start an attempt again: each start has results of its own.
        """
        any_word = " OR ".join("instr({0}, ?)" for _ in words)
        events = (
            "SELECT attempt_id, node, seq, at, kind, data FROM events WHERE attempt_id = attempts.attempt_id"
            f" AND kind IN ('result', 'verdict') AND ({any_word.format('data')})"
        )
        query = (
            f"{ATTEMPTS} WHERE run_id IN (SELECT run_id FROM runs WHERE ended_at IS NULL OR ended_at >= ?)"
            f" AND ({any_word.format('reason')} OR EXISTS ({events})) ORDER BY coalesce(ended_at, created_at), attempt_id"
        )
        with self.database.read() as db:
            attempts = [attempt_from_row(row) for row in db.execute(query, (since, *words, *words))]
            of_one = events.replace("attempts.attempt_id", "?") + " ORDER BY at, seq"
            rows = [db.execute(of_one, (attempt.attempt_id, *words)).fetchall() for attempt in attempts]
        return [
            (attempt, [Event(row[0], row[1], row[2], row[3], row[4], json.loads(row[5])) for row in found])
            for attempt, found in zip(attempts, rows, strict=True)
        ]

    def latest(self, attempt_id: str, node: int, kind: str) -> Event | None:
        """Return the newest event of a kind on one node, or None."""
        query = (
            "SELECT attempt_id, node, seq, at, kind, data FROM events WHERE attempt_id = ? AND node = ? AND kind = ?"
            " ORDER BY seq DESC LIMIT 1"
        )
        with self.database.read() as db:
            row = db.execute(query, (attempt_id, node, kind)).fetchone()
        return Event(row[0], row[1], row[2], row[3], row[4], json.loads(row[5])) if row else None

    def provenance(self, run_id: str) -> dict[str, Any]:
        """Return a run's provenance (cloudtrain.source.provenance); empty for runs of an older cloudtrain."""
        with self.database.read() as db:
            row = db.execute("SELECT data FROM provenance WHERE run_id = ?", (run_id,)).fetchone()
        return dict(json.loads(row[0])) if row else {}

    def dependents(self, run_id: str) -> list[RunRecord]:
        """Return the runs that are sent after this one, the oldest first."""
        named = "instr(job, '\"after\": [\"') AND EXISTS (SELECT 1 FROM json_each(job, '$.after') WHERE value = ?)"
        with self.database.read() as db:
            return [run_from_row(row) for row in db.execute(f"{RUNS} WHERE {named} ORDER BY created_at", (run_id,))]

    def why_cancelled(self, run_id: str) -> str:
        """Return the reason of a cancelled run: why its sweep has stopped it, or that it was cancelled."""
        with self.database.read() as db:
            row = db.execute("SELECT stopped FROM trials WHERE run_id = ?", (run_id,)).fetchone()
        return str(row[0]) if row and row[0] else "cancelled"

    def origins(self) -> dict[str, tuple[str | None, State]]:
        """Return run id -> the URI that it is attached from (None for a run of this machine), and its state."""
        with self.database.read() as db:
            rows = db.execute("SELECT run_id, identity, state FROM runs").fetchall()
        return {
            run_id: (identity.removeprefix(ATTACHED) if (identity or "").startswith(ATTACHED) else None, State(state))
            for run_id, identity, state in rows
        }

    def is_unread(self, run_id: str) -> bool:
        """Return whether a run's state is in the history before the rest of its log and metrics, which are still read."""
        with self.database.read() as db:
            return db.execute("SELECT 1 FROM unread_runs WHERE run_id = ?", (run_id,)).fetchone() is not None

    def names(self) -> list[str]:
        """Return up to 1,000 run ids, the newest first (shell completion)."""
        with self.database.read() as db:
            return [row[0] for row in db.execute("SELECT run_id FROM runs ORDER BY created_at DESC LIMIT 1000")]


def _by_number(db: sqlite3.Connection, text: str) -> list[sqlite3.Row]:
    """Return the run of a short name: the job's name and the run's number."""
    name, _, number = text.rpartition("-")
    if not name or not (number.isascii() and number.isdigit() and len(number) < 19):
        return []
    wanted = "run_id = (SELECT run_id FROM run_numbers WHERE number = ?) AND name = ?"
    return db.execute(f"{RUNS} WHERE {wanted}", (int(number), name)).fetchall()


def _parsed(record: RunRecord) -> RunRecord:
    """Return a record whose job is JSON; raises ValueError for one that was damaged."""
    len(record.job)
    return record
