"""Finds runs that the history has lost on their platforms, by the label of this home that each of its jobs has."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, FoundAttempt, ListsAttempts, Plan
from cloudtrain.backends.plan import ATTEMPT_ID
from cloudtrain.backends.records import VERSION, build_attempt, parse_record
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.history.journal import Entry, Journal
from cloudtrain.job import homes, targets


def _platforms(db: sqlite3.Connection) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the backends, each with its options, of the runs in the history and of the targets that are configured."""
    found = [
        (name, (json.loads(options or "{}") or {}).get(name) or {})
        for name, options in db.execute("SELECT DISTINCT backend, json_extract(job, '$.options') FROM runs").fetchall()
    ]
    with suppress(BadRequest):
        found += [(target.backend, dict(target.options.value)) for target in targets.named_targets().values()]
    yield from {json.dumps(each, sort_keys=True, default=str): each for each in found}.values()


def entries(db: sqlite3.Connection, home: Path, backend: Backend, options: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the attempts of this home that a platform has and the history lacks; blocking. Raises BackendError.

    Another user of the platform may have written what a job says of itself, and may have copied the label. So the options
    are those of the caller, and such a run is never submitted again.
    """
    if not isinstance(backend, ListsAttempts) or not (home_id := homes.home_id(home)):
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


def all_entries(db: sqlite3.Connection, home: Path) -> tuple[list[Entry], list[str]]:
    """Return what `entries` yields of all platforms, and the names of those that gave no answer."""
    found: list[Entry] = []
    silent = []
    for name, options in _platforms(db):
        try:
            for entry in entries(db, home, registry.create(name, options, home), options):
                found.append(entry)
        except CloudtrainError:
            silent.append(name)
    return found, silent


def _plan(found: FoundAttempt, run_id: str, number: int) -> tuple[Plan, str]:
    """Return the plan that a job's own record shows, and when it was made."""
    sent = {**found.record, "version": VERSION, "run_id": run_id, "attempt": number}
    record = parse_record(json.dumps(sent).encode(), run_id, number) or {}
    attempt = build_attempt(record, run_id, number, "", "", superseded=False)
    return attempt.plan, attempt.created_at
