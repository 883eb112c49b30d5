"""Fetch a run's results into a folder: each folder belongs to one run, and a mark in it names that run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends import checkpoints, registry
from cloudtrain.backends.api import FETCHABLE, WORKDIR
from cloudtrain.errors import BadRequest, DiskError
from cloudtrain.runs.planning import attempts
from cloudtrain.source.folder_writer import writing

if TYPE_CHECKING:
    from cloudtrain.history.records import RunRecord
    from cloudtrain.history.store import Store

MARK = ".cloudtrain-run"  # holds the run's id
RETURNED = "outputs/returned"  # what functions have returned (functions/call.py)


@contextmanager
def owned(folder: Path, run_id: str) -> Iterator[None]:
    """Make a folder, and mark it as this run's; without a file in it at the end the mark goes if it is new.

    Raises BadRequest when the folder is none, is another run's, or holds results of which no run is known, and DiskError.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise BadRequest(f"{folder} is not a folder", "choose another folder")
    mark = folder / MARK
    owner = mark.read_text("utf-8").strip() if mark.is_file() else None
    if owner not in (None, run_id):
        raise BadRequest(f"{folder} already has files fetched from {owner}", "choose another folder")
    taken = [name for name in FETCHABLE if (folder / name).exists()] if owner is None else []
    if taken:
        raise BadRequest(
            f"{folder} already contains {taken[0]}/, which was not fetched from this run", "choose another folder"
        )
    new = owner is None and not folder.exists()
    if owner is None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if new:
                (folder / ".gitignore").write_text("*\n")
            mark.write_text(run_id + "\n", "utf-8")
    try:
        yield
    finally:
        if owner is None:
            _remove_mark_if_empty(folder, new=new)


def _remove_mark_if_empty(folder: Path, *, new: bool) -> None:
    """Take the mark off a folder into which nothing came: another run may be fetched into it. A new folder is removed."""
    for name in (*FETCHABLE, WORKDIR):
        for at, folders, names in os.walk(folder / name):
            if names or any((Path(at) / inner).is_symlink() for inner in folders):
                return
    for name in (*FETCHABLE, WORKDIR):
        for at, _, _ in os.walk(folder / name, topdown=False):
            os.rmdir(at)  # noqa: PTH106 - only what is empty
    (folder / MARK).unlink(missing_ok=True)
    if new:
        (folder / ".gitignore").unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            folder.rmdir()


def fetch(store: Store, run: RunRecord, folder: Path, what: Sequence[str]) -> Path:
    """Copy results of the newest attempt that its platform has accepted below a folder and return it; blocking.

    Raises BadRequest, DiskError, and BackendError.
    """
    what = (what,) if isinstance(what, str) else what
    unknown = set(what) - {*FETCHABLE, WORKDIR, RETURNED}
    if unknown:
        raise BadRequest(f"there is no part named {', '.join(sorted(unknown))}", f"one of {', '.join(FETCHABLE)}")
    accepted = [attempt for attempt in store.attempts(run.run_id) if attempt.handle is not None]
    if not accepted:
        raise BadRequest(f"{run.run_id} was never accepted by {run.backend}: there is nothing to fetch")
    newest = accepted[-1]
    assert newest.handle is not None
    backend = attempts.backend_of(newest.plan, store.home, newest.handle, clock=store.clock)
    if WORKDIR in what and not backend.traits.workdir:
        hint = "add keep: [out] to the job: then fetch can copy the files of that folder from every backend"
        raise BadRequest(f"{backend.name} does not offer the working directory (fetch --what workdir)", hint)
    with owned(folder, run.run_id):
        try:
            fetched = backend.fetch(newest.handle, folder, tuple(what))
            if any(registry.traits(attempt.plan.backend).packs for attempt in accepted):
                checkpoints.lift(folder / "checkpoints")  # it has moved
            return fetched
        except OSError as error:
            raise DiskError(error.filename2 or error.filename or folder, error) from None
