"""Sweeps in the history: what each one is, who drives it, and its trials, each of which becomes a run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import UnknownRun
from cloudtrain.events import State
from cloudtrain.history.database import Database
from cloudtrain.history.file import repaired
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process

LIVE = ("RUNNING", "PAUSED", "STOPPING")  # states of a sweep that has not ended; the others are those of runs
_TRIALS = (
    "SELECT t.number, t.params, t.point, t.target, t.retry_of, t.run_id, t.stopped, t.result, r.state, r.reason"
    " FROM trials t LEFT JOIN runs r USING (run_id) WHERE t.sweep_id = ?"
)
_SWEEPS = "SELECT sweep_id, name, spec, created_at, state, reason, ended_at, extra, owner, expires_at FROM sweeps"


@dataclass(frozen=True)
class SweepRecord:
    """A row of `sweeps`."""

    sweep_id: str
    name: str
    spec: Mapping[str, Any]
    created_at: str
    state: str
    reason: str
    ended_at: str | None
    extra: int
    owner: str
    expires_at: float

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def is_driven(self, clock: Clock) -> bool:
        """Whether a living process drives it."""
        process = Process.parse(self.owner)
        return self.expires_at > clock.now() and not (process and process.alive is False)


@dataclass(frozen=True)
class TrialRecord:
    """A row of `trials`, with the state of its run."""

    number: int
    params: Mapping[str, Any]
    point: Mapping[str, Any]
    target: str
    retry_of: int | None
    run_id: str | None
    stopped: str
    result: Sequence[float] | None  # a value for each metric; None where it has none, or has not ended
    ended: bool  # and its result was stored
    state: State | None
    reason: str

    @property
    def deleted(self) -> bool:
        """Whether its run was deleted from the history; its result stays."""
        return self.run_id is not None and self.state is None


@repaired
class SweepHistory:
    """The sweeps below a home. Every public method is one transaction; each process and thread needs its own object."""

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self.home, self.clock = home, clock
        self.database = Database(home, clock)

    def add(self, sweep_id: str, name: str, spec: Mapping[str, Any]) -> None:
        """Store a new sweep; one of that id stays as it is."""
        with self.database.write() as db:
            row = (sweep_id, name, json.dumps(spec), now(self.clock), "RUNNING")
            db.execute(
                "INSERT OR IGNORE INTO sweeps (sweep_id, name, spec, created_at, state) VALUES (?, ?, ?, ?, ?)", row
            )

    def sweeps(self, limit: int = 50) -> list[SweepRecord]:
        """List sweeps, the newest first."""
        with self.database.read() as db:
            return [
                _sweep(row) for row in db.execute(f"{_SWEEPS} ORDER BY created_at DESC, sweep_id LIMIT ?", (limit,))
            ]

    def find(self, text: str | None) -> SweepRecord:
        """Return the sweep of an id or a unique prefix, the newest for None; raises UnknownRun."""
        with self.database.read() as db:
            where, values = ("", ()) if text is None else (" WHERE substr(sweep_id, 1, ?) = ?", (len(text), text))
            rows = db.execute(
                f"{_SWEEPS}{where} ORDER BY sweep_id = ? DESC, created_at DESC LIMIT 6", (*values, text or "")
            )
            found = [_sweep(row) for row in rows]
        if not found:
            said = "there are no sweeps yet" if text is None else f"no sweep has the id or prefix {text!r}"
            raise UnknownRun(
                said, "cloudtrain sweep FILE starts one" if text is None else "cloudtrain sweep ls shows them"
            )
        if text is not None and len(found) > 1 and found[0].sweep_id != text:
            raise UnknownRun(
                f"several sweeps start with {text!r}", f"one of {', '.join(one.sweep_id for one in found)}"
            )
        return found[0]

    def running(self) -> list[SweepRecord]:
        """Return the sweeps that have not ended and are not paused, the oldest first."""
        with self.database.read() as db:
            query = f"{_SWEEPS} WHERE state IN ('RUNNING', 'STOPPING') ORDER BY created_at"
            return [_sweep(row) for row in db.execute(query)]

    def lease(self, sweep_id: str, owner: Process, ttl_s: float) -> bool:
        """Take or renew the lease to drive a sweep; False while another living process holds it, or where it has ended."""
        with self.database.write() as db:
            row = db.execute(f"{_SWEEPS} WHERE sweep_id = ?", (sweep_id,)).fetchone()
            if row is None or (record := _sweep(row)).state not in ("RUNNING", "STOPPING"):
                return False
            if record.owner != str(owner) and record.is_driven(self.clock):
                return False
            expires_at = self.clock.now() + ttl_s
            db.execute(
                "UPDATE sweeps SET owner = ?, expires_at = ? WHERE sweep_id = ?", (str(owner), expires_at, sweep_id)
            )
        return True

    def release(self, sweep_id: str, owner: Process) -> None:
        """Give up the lease, if this process holds it."""
        with self.database.write() as db:
            db.execute("UPDATE sweeps SET expires_at = 0 WHERE sweep_id = ? AND owner = ?", (sweep_id, str(owner)))

    def set_state(self, sweep_id: str, state: str, reason: str = "", *, old: Sequence[str] = LIVE) -> bool:
        """Set a sweep's state where it is one of `old`; False where it was not."""
        ended_at = None if state in LIVE else now(self.clock)
        with self.database.write() as db:
            marks = ", ".join("?" for _ in old)
            query = f"UPDATE sweeps SET state = ?, reason = ?, ended_at = ? WHERE sweep_id = ? AND state IN ({marks})"
            return bool(db.execute(query, (state, reason, ended_at, sweep_id, *old)).rowcount)

    def extend(self, sweep_id: str, trials: int) -> None:
        """Allow more trials than the sweep's budget says; one that has ended runs again."""
        with self.database.write() as db:
            db.execute(
                "UPDATE sweeps SET extra = extra + ?, state = CASE WHEN state = 'PAUSED' THEN state ELSE 'RUNNING' END,"
                " reason = '', ended_at = NULL WHERE sweep_id = ?",
                (trials, sweep_id),
            )

    def delete(self, sweep_id: str) -> bool:
        """Delete a sweep and its trials, not their runs; False where it has not ended."""
        with self.database.write() as db:
            row = db.execute(f"{_SWEEPS} WHERE sweep_id = ?", (sweep_id,)).fetchone()
            if row is not None and _sweep(row).live:
                return False
            db.execute("DELETE FROM trials WHERE sweep_id = ?", (sweep_id,))
            db.execute("DELETE FROM sweeps WHERE sweep_id = ?", (sweep_id,))
        return True

    # -- trials -------------------------------------------------------------------------------------------------------

    def trials(self, sweep_id: str) -> list[TrialRecord]:
        """List the trials of a sweep in their order."""
        with self.database.read() as db:
            return [_trial(row) for row in db.execute(f"{_TRIALS} ORDER BY t.number", (sweep_id,))]

    def add_trial(
        self, sweep_id: str, number: int, params: Mapping[str, Any], point: Mapping[str, Any], target: str,
        retry_of: int | None = None,
    ) -> None:  # fmt: skip
        """Store the intent to run a trial, before it is submitted; one of that number stays as it is."""
        with self.database.write() as db:
            db.execute(
                "INSERT OR IGNORE INTO trials (sweep_id, number, params, point, target, retry_of) VALUES (?, ?, ?, ?, ?, ?)",
                (sweep_id, number, json.dumps(dict(params)), json.dumps(dict(point)), target, retry_of),
            )

    def submitted(self, sweep_id: str, number: int, run_id: str) -> None:
        """Store the run of a trial."""
        with self.database.write() as db:
            db.execute("UPDATE trials SET run_id = ? WHERE sweep_id = ? AND number = ?", (run_id, sweep_id, number))

    def stop(self, sweep_id: str, number: int, why: str) -> None:
        """Store why a trial is to be cancelled, before it is."""
        with self.database.write() as db:
            query = "UPDATE trials SET stopped = ? WHERE sweep_id = ? AND number = ? AND stopped = ''"
            db.execute(query, (why, sweep_id, number))

    def end_trial(self, sweep_id: str, number: int, result: Sequence[float] | None) -> None:
        """Store the values with which a trial has ended."""
        with self.database.write() as db:
            query = "UPDATE trials SET result = ? WHERE sweep_id = ? AND number = ?"
            db.execute(query, (json.dumps(result), sweep_id, number))


def _sweep(row: sqlite3.Row) -> SweepRecord:
    sweep_id, name, spec, *rest = row
    return SweepRecord(sweep_id, name, json.loads(spec), *rest)


def _trial(row: sqlite3.Row) -> TrialRecord:
    number, params, point, target, retry_of, run_id, stopped, result, state, reason = row
    return TrialRecord(
        number, json.loads(params), json.loads(point), target, retry_of, run_id, stopped,
        json.loads(result or "null"), result is not None, State(state) if state else None, reason or "",
    )  # fmt: skip
