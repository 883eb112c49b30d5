"""What the history is asked: runs, attempts, metrics, events. Every question is one transaction, and changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import UnknownRun
from cloudtrain.events import Event, State
from cloudtrain.history.database import Database
from cloudtrain.history.records import ATTEMPTS, RUNS, AttemptRecord, MetricRow, RunRecord, attempt_of, marks, run_of

if TYPE_CHECKING:
    from cloudtrain.history.curves import Curves


class History:
    """The history below a home folder, read; opened on first use, one object for one process and thread."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.database = Database(home)

    @cached_property
    def curves(self) -> Curves:
        """The curves of all runs; a submit draws none."""
        from cloudtrain.history.curves import Curves

        return Curves(self.database)

    @property
    def warnings(self) -> list[str]:
        """What a person should be told, such as a damaged file that was moved aside."""
        return self.database.warnings

    def find(self, text: str | None) -> RunRecord:
        """Return the run of an id or a unique prefix, or the newest one for None; raises UnknownRun."""
        with self.database.read() as db:
            if text is None:
                rows = db.execute(RUNS + " ORDER BY created_at DESC, run_id DESC LIMIT 1").fetchall()
            else:
                rows = (
                    db.execute(RUNS + " WHERE run_id = ?", (text,)).fetchall()
                    or db.execute(
                        RUNS + " WHERE substr(run_id, 1, ?) = ? ORDER BY created_at DESC LIMIT 6", (len(text), text)
                    ).fetchall()
                )
        if not rows:
            raise UnknownRun(
                "there are no runs yet" if text is None else f"no run has the id or prefix {text!r}",
                "cloudtrain submit starts one" if text is None else "cloudtrain ls shows them",
            )
        if len(rows) > 1:
            raise UnknownRun(f"several runs begin with {text!r}", "one of " + ", ".join(row["run_id"] for row in rows))
        return run_of(rows[0])

    def get(self, run_id: str) -> RunRecord | None:
        """Return the run of an exact id, or None."""
        with self.database.read() as db:
            row = db.execute(RUNS + " WHERE run_id = ?", (run_id,)).fetchone()
        return run_of(row) if row else None

    def runs(self, *, limit: int = 50, states: Sequence[State] = (), name: str | None = None) -> list[RunRecord]:
        """Return the newest runs first."""
        order = "ORDER BY created_at DESC, run_id DESC LIMIT ?"
        parts, values = [], []
        for state in states or (None,):  # the newest of each state: an index has them in this order
            wheres = {"state": state and state.value, "name": name}
            given = {column: value for column, value in wheres.items() if value}
            where = " AND ".join(f"{column} = ?" for column in given) or "1"
            parts.append(f"SELECT * FROM ({RUNS} WHERE {where} {order})")
            values += [*given.values(), limit]
        # Sorted again only where there are several: for one, ten thousand whole rows would go through a sorter.
        query, values = (
            (f"{' UNION ALL '.join(parts)} {order}", [*values, limit]) if len(parts) > 1 else (parts[0], values)
        )
        with self.database.read() as db:
            return [run_of(row) for row in db.execute(query, values)]

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
            wheres.append(f"state IN ({marks(states)})")
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
            rows = db.execute(f"{RUNS} WHERE run_id IN ({ids}) ORDER BY created_at DESC, run_id DESC", values)
            return [run_of(row) for row in rows], count

    def targets(self) -> list[str]:
        """Return the targets of all runs."""
        with self.database.read() as db:
            return [row[0] for row in db.execute("SELECT DISTINCT target FROM runs ORDER BY target")]

    def attempts(self, run_id: str) -> list[AttemptRecord]:
        """Return a run's attempts, the oldest first."""
        with self.database.read() as db:
            return [attempt_of(row) for row in db.execute(ATTEMPTS + " WHERE run_id = ? ORDER BY number", (run_id,))]

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
        """Return where a run came from (see cloudtrain.source.provenance); empty for one of an older cloudtrain."""
        with self.database.read() as db:
            row = db.execute("SELECT data FROM provenance WHERE run_id = ?", (run_id,)).fetchone()
        return dict(json.loads(row[0])) if row else {}

    def names(self) -> list[str]:
        """Return all run ids, the newest first (shell completion)."""
        with self.database.read() as db:
            return [row[0] for row in db.execute("SELECT run_id FROM runs ORDER BY created_at DESC LIMIT 1000")]
