"""Delete what ended runs have left (on platforms and hosts, in this home, in the history), and packages that none needs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends.api import Backend
from cloudtrain.errors import BadRequest, CloudtrainError, DiskError
from cloudtrain.events import State, Status
from cloudtrain.history import audit
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.job.units import now
from cloudtrain.nodes import removal
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import spend, upstream
from cloudtrain.runs.planning.attempts import backend_of
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import outcomes
from cloudtrain.source.bundle import Bundle
from cloudtrain.source.digests import FOLDER

FORCE = "cloudtrain rm --here --force"
FOLDERS = ("runs", upstream.FOLDER)  # of the home, which have one of a run's name
RECENT_S = 3600.0  # a submit may be using a package of this age before its run is in the history
MOST = 1_000_000  # runs or sweeps of one history
_FILE = re.compile(r"([0-9a-f]{64})\.(tar\.gz|json|[0-9a-f]+\.patch)")


@dataclass(frozen=True)
class Remains:
    """What a run has left: place -> bytes (None where they are not known), and what stays: its output, other homes' files."""

    run_id: str
    places: Mapping[str, int | None]
    kept: str = ""


def find_remains(run: Run, *, here: bool = False, force: bool = False, take_over: bool = False) -> Remains:
    """Return what `remove` deletes of a run; blocking.

    Args:
        run: the run.
        here: only what is on this machine.
        force: also of a run that has not ended, while its platform does not answer.
        take_over: also of a run of the home that this one is a copy of.

    Raises:
        BadRequest: the run is live, or another home's.
        BackendError: its platform does not answer.
    """
    state = run.record.status.state
    silent: list[CloudtrainError] = []
    if not (here or take_over):
        run.check_home("removed")
    if not (state.final or (state := run.refresh(silent.append).state).final):
        cancel = f"cloudtrain cancel {run.run_id} ends it first"
        if not silent:
            raise BadRequest(f"{run.run_id} is still {state}: only ended runs can be removed", cancel)
        if not force:
            raise BadRequest(f"{run.run_id} is still {state}, and its platform does not answer: {silent[0].message}",
                             f"{cancel}, once the platform answers; {FORCE} {run.run_id} removes it from this machine "
                             "without an answer")  # fmt: skip
    places: dict[str, int | None] = {}
    for handle, backend in () if here else _removable(run):
        places |= backend.remains(handle)
    for folder in (run.store.home / name / run.run_id for name in FOLDERS):
        if (size := removal.measure(folder)) is not None:
            places[str(folder)] = size
    elsewhere = _elsewhere(run, places)
    places[f"{run.store.database.path}, its rows"] = None
    output = "" if run.record.attached else str(run.record.job.get("output") or "")
    return Remains(run.run_id, places, ", ".join(filter(None, (output, *elsewhere))))


def _elsewhere(run: Run, places: Mapping[str, int | None]) -> list[str]:
    """Return folders of a run on this machine that stay: of the home that this one is a copy of, or with `here`."""
    mine = {place.resolve() for place in (run.store.home / "runs", *map(Path, places))}
    if run.record.attached:
        return []
    handles = [Path(attempt.handle) for attempt in run.attempts if attempt.handle]
    runs = sorted({handle.parent.resolve() for handle in handles if handle.is_absolute() and handle.is_dir()})
    return [str(folder) for folder in runs if mine.isdisjoint((folder, *folder.parents))]


def remove(run: Run, *, here: bool = False, force: bool = False) -> str:
    """Delete a run that has ended; blocking, and repeated after an interruption it deletes the rest.

    Its rows go last, so that what is left can still be found. Raises BadRequest, BackendError and DiskError.

    Returns:
        The job that may exist on the platform, where `force` removed a run without an answer; else "".
    """
    find_remains(run, here=True, force=force)  # raises where it is live
    left = "" if run.record.status.state.final else _abandon(run)
    record = run.record
    row = audit.append(
        run.store.home,
        "rm",
        run.run_id,
        target=record.target or record.backend,
        detail=("here, by force" if left else "here") if here else "",
    )
    with audit.copied(run.store.home, {} if record.attached else record.job, row):
        for handle, backend in () if here else _removable(run):
            backend.remove(handle)
    try:
        for name in FOLDERS:
            removal.remove_run(run.store.home / name, run.run_id, stops=False)
    except OSError as error:
        raise DiskError(error.filename or run.store.home, error) from None
    if not record.attached:
        spend.keep(run.store, run.run_id)
    if not run.store.delete(run.run_id):
        raise BadRequest(f"{run.run_id} was resumed in the meantime")
    return left


def _abandon(run: Run) -> str:
    """End a run in the history without its platform's answer, so that nothing sends or watches it; return its job.

    Raises BadRequest where a process is sending it at this moment.
    """
    run.store.request_cancel(run.run_id)  # from here on no retry follows
    newest = run.attempts[-1]
    status = Status(
        State.LOST, None, f"removed by force: {newest.plan.backend} did not answer", ended_at=now(run.store.clock)
    )
    with outcomes.marked_as_sending(newest.attempt_id) as mine:
        if newest.handle is None:
            free = mine and outcomes.is_free(newest, run.store.clock, mine=True)
            if not (free and run.store.change_owner(newest.attempt_id, old=newest.owner, new=Process.here())):
                raise BadRequest(f"{run.run_id} is being sent at this moment", "repeat the command in a minute")
        outcomes.end_attempt(run.store, newest.plan, status)
    return "" if outcomes.is_unsent(newest) else newest.handle or newest.attempt_id


def _removable(run: Run) -> Iterator[tuple[str, Backend]]:
    """Yield each attempt's handle and its backend; of an attached run nothing is deleted."""
    for attempt in () if run.record.attached else run.attempts:
        if attempt.handle is not None:
            backend = backend_of(attempt.plan, run.store.home, attempt.handle, clock=run.store.clock)
            yield attempt.handle, backend


@dataclass(frozen=True)
class Package:
    """A packaged source: its files in the home, their bytes together, and the folder that was packaged."""

    sha256: str
    files: tuple[Path, ...]
    size_bytes: int
    source: str
    idle_s: float  # since it was last packaged or used by a submit
    kept: str = ""  # why it is not to be deleted


def find_packages(store: Store, older_s: float = 0.0, *, force: bool = False) -> list[Package]:
    """Return the packages of a home, the largest first; `kept` of each says why it stays, "" where it is not needed.

    Args:
        store: the history; its home has the packages.
        older_s: keep packages that were used within so many seconds, RECENT_S at least.
        force: without RECENT_S.
    """
    folder, needed = store.home / "bundles", _needed(store)
    files: dict[str, list[Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            files.setdefault(match[1], []).append(path)
    found = []
    for sha256, paths in files.items():
        facts = [path.lstat() for path in paths]
        idle_s = store.clock.now() - max(fact.st_mtime for fact in facts)
        kept = ""
        if sha256 in needed:
            kept = "used by a run or sweep that has not ended"
        elif idle_s <= RECENT_S and not force:
            kept = "used within the last hour; --force deletes it"
        elif idle_s <= older_s:
            kept = "used within the time of --older"
        bundle = Bundle.stored(folder, sha256)
        source = bundle.source if bundle else ""
        size = sum(fact.st_size for fact in facts)
        found.append(Package(sha256, tuple(sorted(paths)), size, source, idle_s, kept))
    return sorted(found, key=lambda package: (package.kept, -package.size_bytes))


def measure_cache(store: Store) -> int:
    """Return the bytes of what is stored about sources beside their packages."""
    return removal.measure(store.home / "bundles" / FOLDER) or 0


def delete_packages(store: Store, packages: Sequence[Package]) -> None:
    """Delete packages; repeated after an interruption it deletes the rest. Raises DiskError."""
    gone = {package.sha256 for package in packages}
    keys = store.home / "bundles" / FOLDER
    try:
        for package in packages:
            for path in package.files:
                path.unlink(missing_ok=True)
        for key in keys.iterdir() if keys.is_dir() else ():  # which package a set of files has (source/bundle.py)
            if "." not in key.name and key.stat().st_size == 64 and key.read_text("ascii") in gone:
                key.unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(error.filename or os.fspath(keys), error) from None


def _needed(store: Store) -> set[str]:
    live = [state for state in State if not state.final]
    runs = [record.run_id for record in store.runs(limit=MOST, states=live)]
    digests = {str(attempt.plan.bundle.get("sha256")) for run_id in runs for attempt in store.attempts(run_id)}
    return digests | {str(sweep.spec.get("bundle")) for sweep in SweepHistory(store.home).sweeps(MOST) if sweep.live}
