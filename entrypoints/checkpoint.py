"""Checkpoints as folders: which are complete, which is the newest, and which may go.

    <checkpoints>/step-00000042.a2/      written by attempt 2 at step 42
        ...                              the state (snapshot.py)
        COMPLETE                         written last: size and sha256 of every other file

A folder without COMPLETE, or with a file that is not what COMPLETE says, is never chosen. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "COMPLETE"
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})\.a(\d+)")


@dataclass(frozen=True, order=True)
class Found:
    """One checkpoint's folder; a later attempt's is newer than any of an earlier one, whatever its step."""

    attempt: int
    step: int
    path: Path

    @property
    def marked(self) -> bool:
        return (self.path / MARKER).is_file()


def folder_of(folder: Path, step: int, attempt: int) -> Path:
    """Return the place of a checkpoint."""
    return folder / f"step-{step:08d}.a{attempt}"


def find(folder: Path) -> list[Found]:
    """Return all checkpoints, torn ones too, the newest first."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((Found(int(name[2]), int(name[1]), path) for name, path in matches if name), reverse=True)


def newest(folder: Path, say: Callable[[str], None]) -> Found | None:
    """Return the newest complete checkpoint; what is passed over is said."""
    for found in find(folder):
        problem = damage(found.path)
        if problem is None:
            return found
        say(f"checkpoint {found.path.name} is passed over: {problem}")
    return None


def damage(path: Path) -> str | None:
    """Return why a checkpoint cannot be trusted, or None; reads every byte of it."""
    try:
        marker = json.loads((path / MARKER).read_bytes())
        if marker["version"] != VERSION:
            return f"it has version {marker['version']}, this trainer reads {VERSION}"
        expected: dict[str, dict[str, Any]] = marker["files"]
        for name, entry in expected.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["size"]:
                return f"{name} has {file.stat().st_size:,} bytes instead of {entry['size']:,}"
            if _sha256(file) != entry["sha256"]:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MARKER} cannot be read ({type(error).__name__})"
    return None


def begin(path: Path) -> None:
    """Make room for a checkpoint; what an interrupted save left there is removed."""
    if path.exists():
        discard(path)
    path.mkdir(parents=True)


def commit(path: Path, **facts: Any) -> int:
    """Put every file on the disk, then COMPLETE; returns the bytes of the checkpoint."""
    files = {}
    for file in sorted(item for item in path.rglob("*") if item.is_file()):
        _sync(file)
        files[file.relative_to(path).as_posix()] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    _sync(path)
    partial = path / f".{MARKER}"
    partial.write_text(json.dumps({"version": VERSION, **facts, "files": files}, indent=1))
    _sync(partial)
    partial.replace(path / MARKER)
    _sync(path)
    _sync(path.parent)
    return sum(entry["size"] for entry in files.values())  # type: ignore[misc]


def prune(folder: Path, keep: int, spare: str = "") -> None:
    """Remove all but the newest complete ones and the one named `spare`, and what torn ones are older than those."""
    complete = [found for found in find(folder) if found.marked]
    if len(complete) < keep:
        return
    oldest = complete[keep - 1]
    for found in find(folder):
        if found < oldest and found.path.name != spare:
            discard(found.path)


def discard(path: Path) -> None:
    """Remove a checkpoint, its COMPLETE first."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
