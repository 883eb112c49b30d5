"""Attach to a run that was submitted elsewhere: its history is copied from its output into this machine's store.

Such a run is marked by its `identity`, which names the URI. No submit takes it for its own, no watcher watches it, and
each command that shows it copies what is new.
"""

from __future__ import annotations

from pathlib import Path

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs import attached_history
from cloudtrain.runs.run import Run


def attach(uri: str, home: Path | None = None) -> Run:
    """Copy the history of the run at <output>/<run id> into the store and return the run; blocking.

    A second call copies what is new. A run that was submitted from here stays as it is. Raises BadRequest,
    BackendError, MissingExtra.
    """
    store = Store(home or targets.home())
    backend = registry.create_attached(store.home)
    attempts = backend.attempts(uri)
    uri, run_id = attempts[0].uri, attempts[0].plan.run_id
    record = store.get(run_id)
    if record is not None and record.attached is None:
        return Run(run_id, store)
    if record is not None and record.attached != uri:
        raise BadRequest(f"{run_id} is attached from {record.attached} already", "it is shown from there")
    attached_history.forget(store, uri)
    attached_history.copy(store, backend, attempts)
    return Run(run_id, store)
