"""Checkpoint folders: write, verify (COMPLETE, sha256), find the newest, prune.

    <checkpoints>/step-00000042.a2/      written at step 42 by the run's start number 2 (epochs.py): its attempt, unless
                                         a platform has started one again by itself
        ...                              the state (state.py)
        COMPLETE                         written last: size and sha256 of every other file

A folder without COMPLETE, or with a file that is not what COMPLETE says, is never chosen. A process that is killed
anywhere leaves a folder without COMPLETE: it gets its name when all files that it lists are on the disk. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

MARKER = "COMPLETE"
VERSION = 1
THREADS = 8  # that read at once: hashing lets go of the interpreter's lock
NAME = re.compile(r"step-(\d{8,})\.a(\d+)")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """One checkpoint's folder; a later attempt's is newer than any of an earlier one, whatever its step."""

    attempt: int
    step: int
    path: Path


def folder_of(folder: Path, step: int, attempt: int) -> Path:
    """Return the place of a checkpoint."""
    return folder / f"step-{step:08d}.a{attempt}"


def find(folder: Path) -> list[Checkpoint]:
    """Return all checkpoints, torn ones too, the newest first."""
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((Checkpoint(int(name[2]), int(name[1]), path) for name, path in matches if name), reverse=True)


def marked(folder: Path) -> dict[Checkpoint, bool]:
    """Return all checkpoints, the newest first, each with whether it has COMPLETE: it comes last and goes first."""
    return {each: (each.path / MARKER).exists() for each in find(folder)}


def newest(
    folder: Path,
    say: Callable[[str], None],
    counts: Callable[[Checkpoint], bool] = lambda checkpoint: True,
    problems: Mapping[Checkpoint, str] = MappingProxyType({}),
) -> Checkpoint | None:
    """Return the newest complete checkpoint among those that count; skipped ones are reported through `say`.

    Args:
        problems: why some of them cannot be used, where that is known.
    """
    for checkpoint in find(folder):
        if counts(checkpoint):
            problem = problems.get(checkpoint) or damage(checkpoint.path)
        else:
            problem = "it was written by a start of this run that a later start replaced"
        if problem is None:
            return checkpoint
        say(f"checkpoint {checkpoint.path.name} is skipped: {problem}")
    return None


def damage(path: Path) -> str | None:
    """Return why a checkpoint cannot be trusted, or None; reads every byte of it."""
    expected = manifest(path)
    if isinstance(expected, str):
        return expected
    if problem := misfit(path, expected):
        return problem
    try:
        digests = _each(lambda name: _sha256(path / name), expected)
    except OSError as error:
        return f"it cannot be read: {error}"
    wrong = (name for name, digest in digests if digest != expected[name]["sha256"])
    return next((f"{name} differs from what was written" for name in wrong), None)


def manifest(path: Path) -> dict[str, dict[str, Any]] | str:
    """Return size and sha256 of each file as COMPLETE has them, or why there is nothing to go by."""
    try:
        text = (path / MARKER).read_bytes()
    except FileNotFoundError:
        return "it is incomplete: COMPLETE is missing"
    except OSError as error:
        return f"its {MARKER} cannot be read: {error}"
    if not text.strip():
        return f"its {MARKER} is empty, so that nothing can be verified: another version or another tool wrote it"
    try:
        marker = json.loads(text)
        if marker["version"] != VERSION:
            return f"it has version {marker['version']}, this trainer reads {VERSION}"
        return {
            str(name): {"size": int(at["size"]), "sha256": str(at["sha256"]), "node": int(at.get("node", 0))}
            for name, at in marker["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MARKER} cannot be read ({type(error).__name__})"


def misfit(path: Path, expected: dict[str, dict[str, Any]]) -> str | None:
    """Return which file is missing or of another size, without reading any."""
    for name, entry in expected.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry["size"]:
            return f"{name} has {size:,} bytes instead of {entry['size']:,}"
    return None


def begin(path: Path) -> None:
    """Make room for a checkpoint; what an interrupted save left there is removed."""
    if path.exists():
        discard(path)
    path.mkdir(parents=True)


def settle(path: Path) -> dict[str, dict[str, Any]]:
    """Put every file on the disk; return size and hash of each."""
    names = sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())
    files = dict(_each(lambda name: _settled(path / name), names))
    for folder in (*(item for item in path.rglob("*") if item.is_dir()), path):
        _sync(folder)
    return files


def commit(path: Path, elsewhere: dict[str, dict[str, Any]] | None = None, **facts: Any) -> int:
    """Put every file on the disk, then COMPLETE; returns the bytes of the checkpoint.

    Args:
        elsewhere: files of the checkpoint on other nodes' disks, as `settle` returns them, with their node.
    """
    files = {**(elsewhere or {}), **settle(path)}
    partial = path / f".{MARKER}"
    partial.write_text(json.dumps({"version": VERSION, **facts, "files": files}, indent=1))
    _sync(partial)
    partial.replace(path / MARKER)
    _sync(path)
    _sync(path.parent)
    return sum(int(entry["size"]) for entry in files.values())


def prune(
    folder: Path,
    keep: int,
    spare: str = "",
    verified: set[str] | None = None,
    counts: Callable[[Checkpoint], bool] = lambda checkpoint: True,
    epoch: float = math.inf,
) -> None:
    """Remove all but the newest verified ones and the one named `spare`, and what torn ones are older than those.

    `verified` holds the names whose bytes are known to be right and takes in those that are read here, so that each
    is read once. Nothing is removed for one that turns out to be damaged, and nothing of a start later than `epoch`.
    """
    verified = set() if verified is None else verified
    whole, older = 0, []
    for checkpoint in find(folder):
        if whole >= keep:
            older.append(checkpoint)
        elif counts(checkpoint) and _stands(checkpoint.path, verified):
            whole += 1
    for checkpoint in older:
        if checkpoint.path.name != spare and checkpoint.attempt <= epoch:
            discard(checkpoint.path)
    for path in folder.glob(".step-*"):
        if (name := NAME.fullmatch(path.name[1:])) and int(name[2]) < epoch:  # a start was killed in `hold`
            shutil.rmtree(path, ignore_errors=True)


def _stands(path: Path, verified: set[str]) -> bool:
    """Return whether a checkpoint counts; its bytes are read once, its files' sizes are looked at each time."""
    if path.name not in verified:
        if damage(path) is not None:
            return False
        verified.add(path.name)
        return True
    return has_all_files(path, written=True)


def has_all_files(path: Path, *, written: bool = False) -> bool:
    """Return whether every file that COMPLETE names is there in its size; reads none of them.

    Args:
        written: this start wrote it: what is on other nodes' disks need not be here.
    """
    expected = manifest(path)
    if isinstance(expected, str):
        return False
    return misfit(path, {name: at for name, at in expected.items() if not (written and at["node"])}) is None


def hold(chosen: Checkpoint, epoch: int) -> Checkpoint | None:
    """Link a checkpoint's files into a folder of this start's own, which no older start removes; None where it is gone.

    It is the checkpoint itself on a file system without links. Its bytes have been verified before.
    """
    held = Checkpoint(epoch, chosen.step, folder_of(chosen.path.parent, chosen.step, epoch))
    partial = held.path.with_name(f".{held.path.name}")
    try:
        shutil.copytree(chosen.path, partial, copy_function=os.link)
        if has_all_files(partial):
            partial.rename(held.path)
    except OSError:  # it was removed meanwhile, is held already, or the file system has no links
        pass
    shutil.rmtree(partial, ignore_errors=True)
    return next((each for each in (held, chosen) if has_all_files(each.path)), None)


def discard(path: Path) -> None:
    """Remove a checkpoint, its COMPLETE first; another start may be removing it too."""
    (path / MARKER).unlink(missing_ok=True)
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass


def _each(act: Callable[[str], Any], names: Iterable[str]) -> list[tuple[str, Any]]:
    """Return (name, what `act` makes of it) in order, several at once; the first error is raised."""
    ordered = list(names)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "hash") as pool:
        return list(zip(ordered, pool.map(act, ordered), strict=True))


def _settled(file: Path) -> dict[str, Any]:
    """Put a file on the disk and return its size and hash."""
    _sync(file)
    return {"size": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
