"""Finds runs that the history has lost on their platforms, by the label of this home that each of its jobs has."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.backends.api import Backend, FoundAttempt, Plan
from cloudtrain.backends.plan import ATTEMPT_ID
from cloudtrain.backends.records import VERSION, build_attempt, parse_record
from cloudtrain.history.journal import Entry, Journal
from cloudtrain.job import homes, targets


def entries(db: sqlite3.Connection, home: Path, backend: Backend, options: Mapping[str, Any]) -> Iterator[Entry]:
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
            plan, created_at = _plan(found, run_id, int(number))
            ours = {"options": {backend.name: dict(options)}, "retry": {"max_attempts": 1}}
            job, target = {**plan.job, **ours}, plan.target or backend.name
            plan = replace(plan, backend=backend.name, target=target, job=job, retries="platform")
            yield Entry(plan, found.created_at or created_at, handle=found.handle)


def _plan(found: FoundAttempt, run_id: str, number: int) -> tuple[Plan, str]:
    """Return the plan that a job's own record shows, and when it was made."""
    sent = {**found.record, "version": VERSION, "run_id": run_id, "attempt": number}
    record = parse_record(json.dumps(sent).encode(), run_id, number) or {}
    attempt = build_attempt(record, run_id, number, "", "", superseded=False)
    return attempt.plan, attempt.created_at
