"""Attaching to a run that was submitted elsewhere: its history, from its output into this machine's store.

The mark of such a run is its `identity`, which names the URI: no submit is ever taken for it, nobody watches it, and it
is brought up to date when somebody looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain import config, watch
from cloudtrain.errors import BadRequest
from cloudtrain.sharedrun import SharedAttempt, SharedBackend, SharedRun
from cloudtrain.store import Store

if TYPE_CHECKING:
    from cloudtrain.run import Run


def attach(uri: str, home: Path | None = None) -> Run:
    """Bring the history of the run at <output>/<run id> into the store and return it; blocking.

    Doing so again brings what is new. A run that was submitted from here stays as it is. Raises BadRequest,
    BackendError, MissingExtra.
    """
    from cloudtrain.run import Run

    store = Store(home or config.home())
    shared = SharedRun(uri)
    attempts = shared.attempts()
    run_id = attempts[0].plan.run_id
    known = store.get(run_id)
    if known is not None and known.attached is None:
        return Run(run_id, store)
    if known is not None and known.attached != shared.uri:
        raise BadRequest(f"{run_id} is attached from {known.attached} already", "it is shown from there")
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
        reader.catch_up({attempt.plan.attempt_id: attempt.status for attempt in attempts})
    finally:
        store.release(first.plan.run_id, reader.me)
