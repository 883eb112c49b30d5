"""Finds the files of trackers below a run's outputs and its working directory, without a walk through all that is there."""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cloudtrain.history.event_files import FILES, TRAINER_STATE, is_event_file, sort_key

MOST_FOLDERS = 4000
MOST_ENTRIES = 2000  # of one folder; a larger one below the first holds data
MOST_DEPTH = 12
_SKIPPED = {
    ".git", ".cache", ".cloudtrain", ".venv", ".mypy_cache", ".pytest_cache", ".ipynb_checkpoints", "__pycache__",
    "site-packages", "node_modules", "venv", "lost+found",
}  # fmt: skip
_ENVIRONMENTS = {"pyvenv.cfg", "conda-meta"}  # what an environment's folder holds
_CHECKPOINT = re.compile(r"(?:^|/)checkpoint-(\d{1,12})$")


def find_files(root: Path, since: float) -> dict[str, Path]:
    """Return trackers' files below a folder that changed since a time (seconds since 1970), at most FILES; blocking.

    The key is the path below the folder. Of Trainer's states of one output folder the newest is returned, below the name
    that it would have in that folder.
    """
    found: dict[str, Path] = {}
    states: dict[str, tuple[float, Path]] = {}
    for name, path in _walk(root):
        if path.name == TRAINER_STATE:
            changed = _modified_at(path)
            folder = _output_folder(name)
            if changed >= since and changed >= states.get(folder, (since, path))[0]:
                states[folder] = (changed, path)
        elif _modified_at(path) >= since:
            found[name] = path
    found |= {f"{folder}/{TRAINER_STATE}".lstrip("/"): path for folder, (_, path) in states.items()}
    return {name: found[name] for name in sorted(found, key=sort_key)[:FILES]}


def resumed_step(path: Path, since: float) -> int:
    """Return the step of the newest checkpoint beside a Trainer's state that is older than a time, 0 where none is."""
    folder = path.parent.parent if _CHECKPOINT.search(path.parent.name) else path.parent
    try:
        names = [each.name for each in folder.iterdir()]
    except OSError:
        return 0
    checkpoints = {int(match[1]): folder / name for name in names if (match := _CHECKPOINT.search(name))}
    older = [step for step, each in checkpoints.items() if 0 <= _modified_at(each / TRAINER_STATE) < since]
    return max(older, default=0)


def _output_folder(name: str) -> str:
    folder = name.rpartition("/")[0]
    return folder.rpartition("/")[0] if _CHECKPOINT.search(folder) else folder


def _walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield trackers' files with their names below a folder, those of its upper folders first."""
    left = deque([("", 0)])
    for _ in range(MOST_FOLDERS):
        if not left:
            return
        folder, depth = left.popleft()
        try:
            with os.scandir(root / folder) as entries:
                inside = list(islice(entries, MOST_ENTRIES + 1))
        except OSError:
            continue
        if (depth and len(inside) > MOST_ENTRIES) or any(entry.name in _ENVIRONMENTS for entry in inside):
            continue
        for entry in inside:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _SKIPPED and depth < MOST_DEPTH:
                    left.append((name, depth + 1))
            elif entry.name == TRAINER_STATE or is_event_file(name):
                yield name, root / name


def _modified_at(path: Path) -> float:
    """Return the modification time of a file; -1 where it is no regular file or is gone."""
    try:
        status = path.stat()
    except OSError:
        return -1.0
    return status.st_mtime if stat.S_ISREG(status.st_mode) else -1.0
