"""Packaged sources in the home: which ones no live run or sweep needs, how large they are, and their deletion."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.errors import DiskError
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.nodes import removal
from cloudtrain.source.bundle import Bundle
from cloudtrain.source.digests import FOLDER

RECENT_S = 3600.0  # a submit may be using a package of this age before its run is in the history
MOST = 1_000_000  # runs or sweeps of one history
_FILE = re.compile(r"([0-9a-f]{64})\.(tar\.gz|json|[0-9a-f]+\.patch)")


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


def delete(store: Store, packages: Sequence[Package]) -> None:
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
