"""Attaching to a run that was submitted elsewhere: its history, from its output into this machine's store.

The mark of such a run is its `identity`, which names the URI: no submit is ever taken for it, nobody watches it, and it
is brought up to date when somebody looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain import events
from cloudtrain.backends.attached.backend import SharedAttempt, SharedBackend, SharedRun
from cloudtrain.errors import BadRequest
from cloudtrain.events import Event
from cloudtrain.history import event_files
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs import watch

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


# Home and URI -> name -> bytes that this process has read: a run that goes on is looked at every few seconds.
_KNOWN: dict[tuple[str, str], dict[str, int]] = {}
_FOLDERS: dict[tuple[str, str], dict[str, event_files.TagPrefixes]] = {}  # of their event files, by attempt


def attach(uri: str, home: Path | None = None) -> Run:
    """Bring the history of the run at <output>/<run id> into the store and return it; blocking.

    Doing so again brings what is new. A run that was submitted from here stays as it is. Raises BadRequest,
    BackendError, MissingExtra.
    """
    from cloudtrain.runs.run import Run

    store = Store(home or targets.home())
    shared = SharedRun(uri)
    attempts = shared.attempts()
    run_id = attempts[0].plan.run_id
    known = store.get(run_id)
    if known is not None and known.attached is None:
        return Run(run_id, store)
    if known is not None and known.attached != shared.uri:
        raise BadRequest(f"{run_id} is attached from {known.attached} already", "it is shown from there")
    for kept in (_KNOWN, _FOLDERS):
        kept.pop((str(store.home), shared.uri), None)
    _bring(store, shared, attempts)
    return Run(run_id, store)


def refresh(store: Store, run_id: str, uri: str) -> None:
    """Bring what is new of an attached run into the store; blocking."""
    shared = SharedRun(uri)
    _bring(store, shared, shared.attempts(), run_id)


def _bring(store: Store, shared: SharedRun, attempts: list[SharedAttempt], run_id: str | None = None) -> None:
    """Write attempts, then what their logs tell, then how they stand: who sees an end finds all that was before it."""
    first = attempts[0]
    if run_id is not None and first.plan.run_id != run_id:
        raise BadRequest(f"{shared.uri} holds {first.plan.run_id} now, not {run_id}")
    for attempt in attempts:
        handle = SharedBackend.handle(attempt.plan.attempt_id, shared.uri)
        store.attach(attempt.plan, handle, attempt.created_at, shared.uri, first.origin)
    reader = watch.Watcher(store, first.plan.run_id)
    try:
        told = {attempt.plan.attempt_id: attempt.status for attempt in attempts}
        reader.catch_up(told, lambda: _bring_tools(store, shared, first.plan.run_id))
    finally:
        store.release(first.plan.run_id, reader.me)


def _bring_tools(store: Store, shared: SharedRun, run_id: str) -> None:
    """Bring in what TensorBoard and W&B left in the run's outputs; what a log has told already is not taken from them.

    All attempts write into the same folder: a point belongs to the one that was the newest when it was written.
    """
    attempts = store.attempts(run_id)
    heard = {
        attempt.attempt_id: store.curves.metric_names(attempt.attempt_id, event_files.FIRST_SEQ) for attempt in attempts
    }
    known = _KNOWN.setdefault((str(store.home), shared.uri), {})
    folders = _FOLDERS.setdefault((str(store.home), shared.uri), {})
    for name, place, data in shared.tools(known):
        rows: dict[str, list[tuple[Event, int, str, float]]] = {}
        prefix: str | None = None
        for point in event_files.read_points(name, data, place):
            begun = [attempt.attempt_id for attempt in attempts if attempt.created_at <= point.at]
            attempt_id = begun[-1] if begun else attempts[0].attempt_id
            if prefix is None:
                prefix = folders.setdefault(attempt_id, event_files.TagPrefixes()).prefix(name)
            event = Event(attempt_id, 0, point.seq, point.at, "metric")
            found = events.rows(event, [(point.step, prefix + point.name, point.value)])
            rows.setdefault(attempt_id, []).extend(row for row in found if row[2] not in heard[attempt_id])
        for attempt_id, points in rows.items():
            store.record(attempt_id, metrics=points)
        known[name] = len(data)
