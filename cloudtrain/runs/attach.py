"""Attach to a run that was submitted elsewhere: its history is copied from its output into this machine's store.

Such a run is marked by its `identity`, which names the URI. No submit takes it for its own, no watcher watches it, and
each command that shows it copies what is new.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs.attached_history import copy, forget
from cloudtrain.runs.run import Run

if TYPE_CHECKING:
    from cloudtrain.backends.plan import AttachedAttempt

READERS = 16  # files that are read at once
BATCH = 500  # runs of one transaction
INDEXED = 64  # fewer runs that are new here are read one by one


class Found(NamedTuple):
    """What lies below a team's output, by run ids."""

    added: list[str]
    updated: list[str]
    ended: list[str]  # which had ended at an earlier look, and were not read again
    own: list[str]  # submitted from this machine, or attached from another place
    unreadable: dict[str, str]  # why
    indexed: list[str]  # of those that were added or updated, from the output's index


def attach_all(
    uri: str,
    home: Path | None = None,
    *,
    again: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Add all runs below a team's output to the history, each with its job and newest state; blocking.

    Runs that have ended are read from the index that launchers keep in the output, many in one file. Of the others it
    reads one small file each, several at once. A run that had ended is not read again. Logs and metrics of a
    run are copied when it is shown.

    Args:
        uri: the folder, s3://, gs:// or az:// that the jobs name as `output`.
        again: read runs that had ended, too: they may have been resumed.
        progress: gets how many runs were read, of how many.

    Raises:
        BadRequest: no run is there. BackendError: it cannot be listed.
    """
    store = Store(home or targets.home())
    backend = registry.create_attached(store.home, store.clock)
    base = uri.rstrip("/")
    if "://" not in base:
        base = str(Path(base).expanduser().absolute())
    base = base.removeprefix("file://")
    names = sorted(backend.run_names(base))
    origins = store.origins()
    found = Found([], [], [], [], {}, [])
    due = []
    for name in names:
        origin = origins.get(name)
        if origin and origin[0] != f"{base}/{name}":
            found.own.append(name)
        elif origin and origin[1].final and not again:
            found.ended.append(name)
        else:
            due.append(name)

    unknown = len(due) if again else sum(name not in origins for name in due)
    index = backend.read_index(base) if unknown >= INDEXED else {}

    def read(name: str) -> AttachedAttempt | str:
        try:
            if name in index and (attempt := backend.indexed_attempt(base, name, index[name])):
                found.indexed.append(name)
                return attempt
            return backend.newest_attempt(base, name) or ""
        except CloudtrainError as error:
            return error.message

    with ThreadPoolExecutor(READERS) as pool:
        for first in range(0, len(due), BATCH):
            batch = due[first : first + BATCH]
            made = []
            for name, attempt in zip(batch, pool.map(read, batch), strict=True):
                if not isinstance(attempt, str):
                    made.append(attempt)
                    (found.updated if name in origins else found.added).append(name)
                elif attempt:
                    found.unreadable[name] = attempt
            store.attach_all(made)
            progress(first + len(batch), len(due))
    if not any(found[:4]) and not found.unreadable:
        raise BadRequest(
            f"there is no run below {uri}",
            "give the folder or bucket that the jobs have as output, or one run: OUTPUT/RUN_ID",
        )
    return found


def attach(uri: str, home: Path | None = None) -> Run:
    """Add a run that was submitted from another machine to this machine's history; blocking.

    A second call copies what is new. A run that was submitted from this machine does not change.

    Args:
        uri: The run's folder in its job's output, <output>/<run id>: a path, s3://, gs:// or az://.
        home: Folder of the history; None for CLOUDTRAIN_HOME or ~/.local/share/cloudtrain.

    Returns:
        The run. It can be read and resumed, but not cancelled.

    Raises:
        BadRequest: There is no run history at `uri`.
        BackendError: The bucket cannot be reached, or access is denied.
        MissingExtra: The library for the bucket is not installed.
    """
    store = Store(home or targets.home())
    backend = registry.create_attached(store.home, store.clock)
    attempts = backend.attempts(uri)
    uri, run_id = attempts[0].uri, attempts[0].plan.run_id
    record = store.get(run_id)
    if record is not None and record.attached is None:
        return Run(run_id, store)
    if record is not None and record.attached != uri:
        raise BadRequest(f"{run_id} is attached from {record.attached} already", "cloudtrain shows it from that place")
    forget(store, uri)
    copy(store, backend, attempts)
    return Run(run_id, store)
