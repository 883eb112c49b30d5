"""Repairs a damaged history: keeps the file, copies what SQLite can still read, and finds lost runs again.

Lost runs are named by the journal, and on their platforms by the label of this home that each of its jobs has.

A connection to a file that was renamed is never closed: SQLite would delete the -wal file of the one that replaced it, by
its name (https://sqlite.org/howtocorrupt.html#_unlinking_or_renaming_a_database_file_while_in_use, read 2026-11-23).
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, FoundAttempt, Plan
from cloudtrain.backends.plan import ATTACHED, ATTEMPT_ID
from cloudtrain.backends.records import VERSION, build_attempt, parse_record
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.events import State
from cloudtrain.history.file import Entry, Journal, entries_of_folders
from cloudtrain.history.migrations import FILL_METRICS, migrate
from cloudtrain.history.points import fill_curves
from cloudtrain.history.records import ATTEMPTS, RESUMED, RUNS, add_attempt, add_run, attempt_from_row, run_from_row
from cloudtrain.history.usage import FILL_USAGE
from cloudtrain.job import homes, targets
from cloudtrain.job.units import now

# table -> the order of its rows in the file
TABLES = {
    "run_numbers": "number",  # before the runs, which would get others
    "runs": "rowid",
    "attempts": "rowid",
    "provenance": "run_id",
    "environments": "rowid",
    "events": "attempt_id, node, seq",
    "metrics": "attempt_id, node, seq, name",
    "notices": "rowid",
    "leases": "rowid",
    "marks": "rowid",
    "unread_runs": "run_id",
    "views": "rowid",
    "layouts": "project",
    "watchers": "rowid",
    "sweeps": "rowid",
    "trials": "sweep_id, number",
}
SEARCHED = "repair"  # `event` of an attempt for which its platform is to be asked
RESTORED = "the history was damaged and is repaired; `cloudtrain doctor` asks the platform for this job"
_PARTS = ("-wal", "-shm", "-journal", "")  # the file itself comes last: until then the next command begins again
_JSON = {
    "job", "plan", "data", "images", "pointers", "hidden", "lacking", "tags", "spec", "params", "point", "result"
}  # fmt: skip
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_CUT = sqlite3.SQLITE_IOERR_SHORT_READ  # the -wal file is shorter than its index says


class Damaged(sqlite3.DatabaseError):
    """The file is damaged in a way that SQLite does not notice."""


def is_damage(error: BaseException) -> bool:
    """Return whether SQLite says that the file is damaged."""
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, Damaged) or code & 0xFF in _DAMAGE or code == _CUT


def leak(connection: sqlite3.Connection) -> None:
    """Keep a connection open until this process ends, whoever drops it."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def find_problem(path: Path) -> str:
    """Return what is wrong with a history file, "" where it is sound: integrity_check, its schema, its runs and attempts."""
    db = sqlite3.connect(path, timeout=1.0)
    db.row_factory = sqlite3.Row
    found = ""
    try:
        if (answer := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            found = str(answer)
        elif lacking := _schema(_new(":memory:")) - _schema(db):
            found = f"it lacks {min(lacking)[0]}"
        else:
            for row in db.execute(RUNS):
                dict(run_from_row(row).job)
            for row in db.execute(ATTEMPTS):
                attempt_from_row(row)
            lost = db.execute("SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM attempts)").fetchone()
            found = f"{lost[0]} has no attempt" if lost else ""
    except sqlite3.OperationalError as error:
        if not is_damage(error) and not any(phrase in str(error) for phrase in ("decode", "unsupported file")):
            return ""  # it is locked, say
        found = str(error)
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError, BadRequest) as error:
        found = str(error)
    leak(db) if found else db.close()
    return found


def rebuild(path: Path) -> tuple[Path, int]:
    """Keep a damaged file beside a new one in its place; returns its new name and how many runs were copied.

    Blocking. Nobody else may open the file meanwhile; who has it open sees that it is another one.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # of a repair that was killed
    target, source = _new(new), None
    try:
        if path.stat().st_size:  # else SQLite would delete the -wal file
            source = sqlite3.connect(path, timeout=1.0, isolation_level=None)
            leak(source)
            with suppress(sqlite3.Error):
                source.execute("BEGIN IMMEDIATE")  # a process that still writes there waits
            _Copy(source, target).run()
        target.execute(
            "DELETE FROM runs WHERE run_id NOT IN (SELECT run_id FROM attempts)"
        )  # restore() adds them again
        count = target.execute("SELECT count(*) FROM runs").fetchone()[0]
        target.close()
        aside = path.with_name(f"{path.name}.corrupt-{SYSTEM.utc():%y%m%d-%H%M%S-%f}-{os.getpid()}")
        for suffix in _PARTS:
            part = Path(f"{path}{suffix}")
            if suffix and part.exists():
                part.rename(f"{aside}{suffix}")
        os.link(path, aside)
        new.replace(path)
        return aside, count
    finally:
        if source is not None and source.in_transaction:
            with suppress(sqlite3.Error):
                source.execute("ROLLBACK")


def restore(db: sqlite3.Connection, home: Path) -> int:
    """Add the attempts that the journal or a run's folder names and the history lacks, inside a transaction.

    Returns how many runs these are. Each is LOST until `search` has asked its platform. Calls no platform.
    """
    known = {row[0] for row in db.execute("SELECT attempt_id FROM attempts")}
    entries = [*entries_of_folders(home / "runs"), *Journal(home).entries()]
    lost = {entry.plan.attempt_id: entry for entry in entries if entry.plan.attempt_id not in known}
    for entry in lost.values():
        insert(db, entry)
    return len({entry.plan.run_id for entry in lost.values()})


def search(db: sqlite3.Connection, home: Path) -> str:
    """Ask the platforms for the attempts that were restored, by their labels; blocking.

    Returns in words what they answered, "" where nothing was to be asked.
    """
    rows = db.execute(f"{ATTEMPTS} WHERE event = ? ORDER BY created_at", (SEARCHED,)).fetchall()
    found = unanswered = 0
    for attempt in map(attempt_from_row, rows):
        name, handle, event = attempt.plan.backend, None, ""
        try:
            handle = registry.create_for(attempt.plan, home).find(attempt.attempt_id)
            reason = (
                ""
                if handle
                else f"the history was damaged and is repaired; {name} does not know this job: never started, or deleted"
            )
        except CloudtrainError as error:
            event, reason = (
                SEARCHED,
                f"the history was damaged and is repaired; {name} gives no answer about this job: {error.message}",
            )
        found, unanswered = found + (handle is not None), unanswered + bool(event)
        state, ended_at = (State.QUEUED, None) if handle else (State.LOST, now())
        with db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(
                "UPDATE attempts SET handle = ?, event = ?, state = ?, reason = ?, ended_at = ? WHERE attempt_id = ?",
                (handle, event, state, reason, ended_at, attempt.attempt_id),
            )
            _set_run_state(db, attempt.run_id)
    hint = f", {unanswered} did not answer: run `cloudtrain doctor` to ask again" if unanswered else ""
    return f"{found} of {len(rows)} lost attempts were found on their platforms{hint}" if rows else ""


def insert(db: sqlite3.Connection, entry: Entry) -> None:
    """Insert an attempt, and its run where that is missing."""
    plan = entry.plan
    state, event, reason = (State.QUEUED, "", "") if entry.handle else (State.LOST, SEARCHED, RESTORED)
    added = add_run(
        db,
        plan,
        entry.identity,
        entry.created_at,
        key=entry.key,
        parent=entry.parent,
        acked_at=now(),
        state=state.value,
    )
    if not added and entry.identity == RESUMED:
        query = f"UPDATE runs SET identity = ? WHERE run_id = ? AND identity LIKE '{ATTACHED}%'"
        db.execute(query, (RESUMED, plan.run_id))
    add_attempt(db, plan, entry.created_at, handle=entry.handle, state=state.value, event=event, reason=reason)
    _set_run_state(db, plan.run_id)


def _set_run_state(db: sqlite3.Connection, run_id: str) -> None:
    """Give a run the state of its newest attempt."""
    db.execute(
        "UPDATE runs SET (state, exit_code, reason, ended_at) = (SELECT state, exit_code, reason, ended_at FROM attempts a"
        " WHERE a.run_id = runs.run_id ORDER BY number DESC LIMIT 1) WHERE run_id = ?",
        (run_id,),
    )


def _new(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    migrate(db)
    return db


def _schema(db: sqlite3.Connection) -> set[tuple[str, str]]:
    """Return the names of tables with their columns, and of indexes and triggers."""
    query = "SELECT m.name, coalesce(c.name, '') FROM sqlite_master m LEFT JOIN pragma_table_info(m.name) c"
    return {tuple(row) for row in db.execute(query)}


class _Copy:
    """Copies the rows of one history into another, as far as they can be read and are what they should be."""

    def __init__(self, source: sqlite3.Connection, target: sqlite3.Connection) -> None:
        self._source, self._target = source, target
        source.text_factory = lambda data: data.decode("utf-8", "surrogateescape")

    def run(self) -> None:
        with suppress(sqlite3.Error):
            self._source.execute("PRAGMA writable_schema = ON")  # reads a file that is shorter than its header says
        self._target.execute("BEGIN")
        for table, order in TABLES.items():
            with suppress(sqlite3.Error):  # the source has no such table that could be read
                self._copy(table, order)
        # Events and metrics of attempts that are open are read again from the log.
        self._target.execute("UPDATE attempts SET cursor = NULL WHERE ended_at IS NULL")
        query = "SELECT plan, created_at, handle FROM attempts WHERE run_id NOT IN (SELECT run_id FROM runs)"
        for plan, created_at, handle in self._target.execute(query).fetchall():
            insert(self._target, Entry(Plan.from_json(plan), created_at, handle=handle))
        for (attempt_id,) in self._target.execute("SELECT DISTINCT attempt_id FROM metrics").fetchall():
            fill_curves(self._target, attempt_id)
        self._target.execute(FILL_METRICS)
        self._target.execute(FILL_USAGE)
        self._target.execute("COMMIT")

    def _copy(self, table: str, order: str) -> None:
        """Copy the rows of a table from its begin up to the first damage, and from its end back to the last one."""
        types = {row[1]: row[2] for row in self._target.execute(f"PRAGMA table_info({table})")}
        columns = [row[1] for row in self._source.execute(f"PRAGMA table_info({table})") if row[1] in types]
        insert = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        for direction in ("", " DESC"):
            ordered = ", ".join(f"{column}{direction}" for column in order.split(", "))
            try:
                for row in self._source.execute(
                    f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED ORDER BY {ordered}"
                ):
                    if _is_valid(table, dict(zip(columns, row, strict=True)), types):
                        self._target.execute(insert, row)
                return
            except sqlite3.DatabaseError:
                continue


def _is_valid(table: str, row: dict[str, Any], types: dict[str, str]) -> bool:
    """Return whether the values of a row are what their columns hold: text that decodes, JSON that parses, numbers."""
    try:
        for column, value in row.items():
            if value is None:
                continue
            if isinstance(value, str):
                value.encode()
            if column in _JSON:
                json.loads(value)
            if not isinstance(value, str if types[column] == "TEXT" else int | float):
                return False
        if table == "attempts":
            plan = Plan.from_json(row["plan"])
            if (plan.attempt_id, plan.run_id, plan.attempt) != (row["attempt_id"], row["run_id"], row["number"]):
                return False
        return table == "sweeps" or "state" not in row or row["state"] in State.__members__
    except (ValueError, TypeError, BadRequest):
        return False


def labelled(db: sqlite3.Connection, home: Path, backend: Backend, options: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the attempts of this home that a platform has and the history lacks; blocking. Raises BackendError.

    Another user of the platform may have written what a job says of itself, and may have copied the label. So the options
    are those of the caller, and such a run is never submitted again.
    """
    if not (home_id := homes.home_id(home)):
        return
    known = {row[0] for row in db.execute("SELECT attempt_id FROM attempts")}
    removed = Journal(home).removed()
    for found in backend.labelled(targets.HOME_LABEL, home_id, known):
        run_id, _, number = found.attempt_id.rpartition("-a")
        if ATTEMPT_ID.fullmatch(found.attempt_id) and run_id not in removed:
            plan, created_at = _labelled_plan(found, run_id, int(number))
            ours = {"options": {backend.name: dict(options)}, "retry": {"max_attempts": 1}}
            job, target = {**plan.job, **ours}, plan.target or backend.name
            plan = replace(plan, backend=backend.name, target=target, job=job, retries="platform")
            yield Entry(plan, found.created_at or created_at, handle=found.handle)


def _labelled_plan(found: FoundAttempt, run_id: str, number: int) -> tuple[Plan, str]:
    """Return the plan that a job's own record shows, and when it was made."""
    sent = {**found.record, "version": VERSION, "run_id": run_id, "attempt": number}
    record = parse_record(json.dumps(sent).encode(), run_id, number) or {}
    attempt = build_attempt(record, run_id, number, "", "", superseded=False)
    return attempt.plan, attempt.created_at
