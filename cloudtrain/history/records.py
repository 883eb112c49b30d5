"""Records of the history: a run, an attempt, a metric point."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cloudtrain.backends.plan import ATTACHED, Plan
from cloudtrain.events import State, Status
from cloudtrain.job.units import unix_time

RUNS = (
    "SELECT run_id, name, backend, target, key, parent, identity, job, created_at, acked_at, cancel_at, state, exit_code,"
    " reason, started_at, ended_at, url, billable_s FROM runs"
)
RESUMED = "resumed"  # `identity` of a run that was attached and has been resumed here
ATTEMPTS = "SELECT attempts.* FROM attempts"
KEPT = 32  # plans and jobs that are not parsed anew when they are read again
_STATES = {state.value: state for state in State}


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
        """URI from which an attached run (submitted elsewhere) is read; None for a run submitted from this store."""
        return self.identity.removeprefix(ATTACHED) if self.identity.startswith(ATTACHED) else None


@dataclass(frozen=True)
class AttemptRecord:
    """A row of `attempts`. `handle` is None until the platform accepts the attempt.

    `owner` is the process that submits it, marked where a watcher or a reader does (`runs.open_attempt`); empty where the
    submission ended without an answer.
    """

    attempt_id: str
    run_id: str
    number: int
    plan: Plan
    handle: str | None
    owner: str
    cursor: str | None
    created_at: str
    status: Status
    images: Mapping[int, str]  # node -> container image (backends.images.pinned_image), where the platform reported it
    tries: int = 0  # submissions, and lookups of them, that got no answer
    tried_at: str | None = None  # time of the last one
    unanswered_since: str | None = None  # None where the outcome of the submission is known


@dataclass(frozen=True)
class MetricRow:
    """One point of a metric."""

    attempt: int
    node: int
    seq: int
    at: str
    name: str
    step: int
    value: float
    rank: int = 0
    epoch: float | None = None  # None where it is not known


def _status(row: sqlite3.Row) -> Status:
    names = ("exit_code", "reason", "started_at", "ended_at", "url", "billable_s")
    exit_code, reason, started_at, ended_at, url, billable_s = (row[name] for name in names)
    state, event = _STATES[row["state"]], row["event"]
    return Status(state, exit_code, reason, _time(started_at), _time(ended_at), url, billable_s, event)


def _time(text: str | None) -> str | None:
    """Return a stored time; None where it is damaged, so that one row hides no others."""
    try:
        return text if text and unix_time(text) else None
    except ValueError:
        return None


def run_from_row(row: sqlite3.Row) -> RunRecord:
    """Convert a row of the query RUNS."""
    # By position: looking up seventeen names took a quarter of the time of listing ten thousand runs.
    (run_id, name, backend, target, key, parent, identity, job, created_at, acked_at, cancel_at, state, exit_code, reason,
     started_at, ended_at, url, billable_s) = row  # fmt: skip
    status = Status(_STATES[state], exit_code, reason, _time(started_at), _time(ended_at), url, billable_s)
    return RunRecord(run_id, name, backend, target, key, parent, identity, _LazyMapping(job), created_at,
                     acked_at is not None, cancel_at is not None, status)  # fmt: skip


@lru_cache(KEPT)
def _plan(text: str) -> Plan:
    """Return a stored plan, which is shared between readers: most of a look at a run was to parse it anew."""
    return Plan.from_json(text)


def attempt_from_row(row: sqlite3.Row) -> AttemptRecord:
    """Convert a row of the query ATTEMPTS."""
    return AttemptRecord(
        attempt_id=row["attempt_id"],
        run_id=row["run_id"],
        number=row["number"],
        plan=_plan(row["plan"]),
        handle=row["handle"],
        owner=row["owner"],
        cursor=row["cursor"],
        created_at=row["created_at"],
        status=_status(row),
        images={int(node): image for node, image in json.loads(row["images"]).items()} if row["images"] else {},
        tries=row["tries"],
        tried_at=row["tried_at"],
        unanswered_since=row["unanswered_since"],
    )


def add_run(
    db: sqlite3.Connection,
    plan: Plan,
    identity: str,
    created_at: str,
    provenance: Mapping[str, Any] | None = None,
    **columns: str | None,
) -> bool:
    """Insert the run of a plan, inside a transaction, with further `columns`; False where it exists."""
    about = {"name": plan.job.get("name", ""), "backend": plan.backend, "target": plan.target}
    row = {"run_id": plan.run_id, **about, "identity": identity, "job": json.dumps(plan.job), "created_at": created_at}
    added = _insert(db, "runs", row | {"state": State.QUEUED.value} | columns)
    if added and provenance:
        _insert(db, "provenance", {"run_id": plan.run_id, "data": json.dumps(provenance)})
    return added


def add_attempt(
    db: sqlite3.Connection, plan: Plan, created_at: str, *, text: str = "", owner: str = "", **columns: str | None
) -> bool:
    """Insert an attempt, inside a transaction, with further `columns`; False where it exists. `text` is the plan's JSON."""
    ids = {
        "attempt_id": plan.attempt_id,
        "run_id": plan.run_id,
        "number": plan.attempt,
        "plan": text or plan.to_json(None),
    }
    row = ids | {"owner": owner, "created_at": created_at, "state": State.QUEUED.value}
    return _insert(db, "attempts", row | columns)


def _insert(db: sqlite3.Connection, table: str, row: Mapping[str, object]) -> bool:
    query = f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
    return db.execute(query, tuple(row.values())).rowcount > 0


def delete_rows(db: sqlite3.Connection, run_id: str) -> None:
    """Delete the rows of a run, inside a transaction."""
    for table in ("events", "metrics", "curves", "notices"):
        its_attempts = "SELECT attempt_id FROM attempts WHERE run_id = ?"
        db.execute(f"DELETE FROM {table} WHERE attempt_id IN ({its_attempts})", (run_id,))
    for table in (
        "attempts",
        "provenance",
        "environments",
        "leases",
        "run_values",
        "run_metrics",
        "run_usage",
        "unread_runs",
        "marks",
        "runs",
    ):
        db.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))


@lru_cache(KEPT)
def _mapping(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


class _LazyMapping(Mapping[str, Any]):
    """A mapping that parses its JSON on first access: a list of runs reads no job."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._parsed: dict[str, Any] | None = None

    @property
    def _data(self) -> dict[str, Any]:
        if self._parsed is None:
            self._parsed = _mapping(self._text)
        return self._parsed

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return repr(self._data)
