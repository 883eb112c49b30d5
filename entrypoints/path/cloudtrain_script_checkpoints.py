"""Checkpoints that scripts write themselves: which one is whole and newest, the mark COMPLETE, and the starts of a run.

A start claims its number by a file; what an earlier start completes later is never chosen. The Hugging Face Trainer's and
Accelerate's folders are known. Standard library only; Python 3.9 on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from typing import Any, Callable, Optional

import cloudtrain_fence

MARKER = "COMPLETE"  # in a checkpoint's folder: size and sha256 of every other file; trainer/checkpoints/files.py writes the same
_TRAINERS = re.compile(r"checkpoint-(\d+)")  # transformers.Trainer
# Accelerator.save_state with automatic names, and as Accelerate's examples name what it saves
_ACCELERATES = re.compile(r"(?:checkpoint|step|epoch)_(\d+)")

_LAST = ("trainer_state.json", "random_states_0.pkl")  # what the two write last

_epoch = 0  # which start of the run this is, once its script has asked for a checkpoint


def find_latest(here: Any, folder: str | None) -> str | None:
    """Return the newest complete checkpoint of a folder, or of the run of the context `here`, and claim a start of that run."""
    base = here.checkpoint_dir if folder is None else folder
    history, path = _history(base), None
    for epoch, step, candidate in sorted(_checkpoints(base), reverse=True):
        stale = epoch > 0 and step > history.get(epoch, -1)
        problem = "it was written by a start of this run that a later start replaced" if stale else _damage(candidate)
        if not problem:
            path = candidate
            break
        sys.stderr.write(f"checkpoint {os.path.basename(candidate)} is skipped: {problem}\n")
    if folder is None and os.environ.get("CLOUDTRAIN_RUN_ID") and int(os.environ.get("RANK") or 0) == 0:
        _begin(here, path)
    return path


def complete(path: str, step: int, emit: Callable[..., None]) -> None:
    """Mark a folder as a complete checkpoint and report it; `emit` prints an event."""
    files = {}
    for name in sorted(_files(path)):
        with open(os.path.join(path, name), "rb") as file:
            os.fsync(file.fileno())
        files[name] = {"size": os.path.getsize(os.path.join(path, name)), "sha256": _sha256(os.path.join(path, name))}
    partial = os.path.join(path, f".{MARKER}")
    with open(partial, "w") as mark:
        json.dump({"version": 1, "step": step, "epoch": _epoch, "files": files}, mark)
        mark.flush()
        os.fsync(mark.fileno())
    os.replace(partial, os.path.join(path, MARKER))
    emit("checkpoint", step=step, path=str(path))
    if later := later_start(os.path.dirname(os.path.abspath(path))):
        emit(
            "alarm",
            reason=f"start {later} of this run has started: checkpoints of this one, {_epoch}, are no longer used",
        )


def start() -> int:
    """Return which start of the run this is, 0 where none was claimed."""
    return _epoch


def later_start(base: str) -> int:
    """Return the number of a start that has replaced this one, 0 without."""
    later = cloudtrain_fence.newest(base)
    return later if 0 < _epoch < later else 0


def place(path: str, final: str) -> None:
    """Give a complete checkpoint its name; one that an earlier start left there, out of the run's history, is removed."""
    discard(final)
    os.rename(path, final)
    for folder in (os.path.dirname(path), os.path.dirname(final)):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    os.rmdir(os.path.dirname(path))


def prune(base: str, keep: int, spare: str = "") -> None:
    """Remove marked checkpoints that are older than the newest `keep` whole ones of the run's history, but not `spare`."""
    history, whole = _history(base), 0
    for epoch, step, path in sorted(_checkpoints(base), reverse=True):
        if not os.path.exists(os.path.join(path, MARKER)):
            continue  # the script's own matter
        if whole >= keep and os.path.basename(path) != spare:
            discard(path)
        elif (not epoch or step <= history.get(epoch, -1)) and not _misfit(path, _marked(path)):
            whole += 1


def discard(path: str) -> None:
    """Remove a checkpoint, its mark first: a process that is killed in between leaves one that is not chosen."""
    if os.path.isdir(path):
        for name in filter(os.path.exists, (os.path.join(path, name) for name in (MARKER, *_LAST))):
            os.unlink(name)
        shutil.rmtree(path)


def _begin(here: Any, path: str | None) -> None:
    """Claim the next start of the run, and record from where it resumes."""
    global _epoch
    base = here.checkpoint_dir
    marked = _marked(path) if path else {}
    record = {"from": os.path.basename(path or ""), "epoch": marked.get("epoch", 0), "step": marked.get("step", 0)}
    try:
        if not _epoch:
            _epoch = cloudtrain_fence.claim(
                base,
                here.epoch,
                lambda given: (given or max(here.attempt - 1, cloudtrain_fence.newest(base)) + 1, record),
            )
    except OSError as error:
        sys.stderr.write(f"this start of the run could not be recorded: {error}\n")


def _history(base: str) -> dict[int, float]:
    """Return up to which step the checkpoints of each start are the run's history; of others none is."""
    origins: dict[int, Optional[tuple[int, float]]] = {}
    for number, record in cloudtrain_fence.records(base).items():
        try:
            origins[number] = int(record["epoch"]), int(record["step"])
        except (KeyError, TypeError, ValueError):
            origins[number] = None  # it did not ask where to begin
    starts = {*origins, *(epoch for epoch, _, _ in _checkpoints(base))} - {0}
    limits: dict[int, float] = cloudtrain_fence.history(starts, origins)
    return limits


def _checkpoints(base: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, number and path of what may be a checkpoint; 0 for a start that is not known."""
    for folder in (base, os.path.join(base, "checkpoints")):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            match = _TRAINERS.fullmatch(name) or _ACCELERATES.fullmatch(name)
            if os.path.exists(os.path.join(path, MARKER)):
                mark = _marked(path)
                yield int(mark.get("epoch", 0)), int(mark.get("step", match[1] if match else 0)), path
            elif match:
                yield 0, int(match[1]), path


def _damage(path: str) -> str:
    """Return why a checkpoint cannot be trusted, "" for a whole one."""
    marked = _marked(path)
    if marked:
        if problem := _misfit(path, marked):
            return problem
        wrong = (name for name, at in marked["files"].items() if _sha256(os.path.join(path, name)) != at["sha256"])
        return next((f"{name} differs from what was written" for name in wrong), "")
    if os.path.exists(os.path.join(path, MARKER)):
        return f"its {MARKER} cannot be read"
    names = _files(path)
    last = _LAST[0 if _TRAINERS.fullmatch(os.path.basename(path)) else 1]
    if last not in names:
        return f"it is incomplete: {last} is missing"
    return next((f"{name} is cut off" for name in names if not _has_end(os.path.join(path, name))), "")


def _misfit(path: str, marked: dict[str, Any]) -> str:
    """Return which file is not what the mark says by its size, "" for none; reads no file."""
    for name, expected in marked.get("files", {MARKER: {"size": -1}}).items():
        file = os.path.join(path, name)
        if not os.path.isfile(file) or os.path.getsize(file) != expected["size"]:
            return f"{name} is missing or has another size"
    return ""


def _marked(path: str) -> dict[str, Any]:
    """Return what a folder's COMPLETE says, {} where that is not to be read."""
    try:
        with open(os.path.join(path, MARKER), "rb") as file:
            mark = json.load(file)
        sizes = [(int(entry["size"]), str(entry["sha256"])) for entry in mark["files"].values()]
        return mark if sizes and int(mark.get("step", 0)) >= 0 else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _files(path: str) -> list[str]:
    """Return the files below a folder by their relative paths, marks of its own left out."""
    names_below = [os.path.relpath(os.path.join(at, name), path) for at, _, names in os.walk(path) for name in names]
    return [name for name in names_below if name not in (MARKER, f".{MARKER}")]


def _has_end(file: str) -> bool:
    """Return whether a file of torch, of safetensors or of JSON is not cut off; any other may be."""
    try:
        if file.endswith((".pt", ".pth", ".bin", ".pkl")):
            with open(file, "rb") as opened:
                zipped = opened.read(2) == b"PK"  # torch's; what pickle alone wrote has no mark at its end
            return zipfile.is_zipfile(file) if zipped else os.path.getsize(file) > 0
        if file.endswith(".safetensors"):
            with open(file, "rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                head = json.loads(opened.read(min(length, 100 << 20)))
            ends = [entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"]
            return os.path.getsize(file) == 8 + length + max(ends, default=0)
        if file.endswith(".json"):
            with open(file, "rb") as opened:
                json.load(opened)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False
    return True


def _sha256(file: str) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
