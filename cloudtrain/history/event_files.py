"""Reads metrics from files of TensorBoard, W&B (offline), MLflow and transformers' Trainer, without these packages.

A file is read incrementally: the next read continues where the last one stopped, and a record that is only half written
waits for it. Files of another format are skipped. They are found without a walk through all that a run has written.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from cloudtrain.history.event_records import (
    MOST_BYTES,
    Scalar,
    mlflow_points,
    mlflow_records,
    tensorboard_points,
    tensorboard_records,
    trainer_points,
    wandb_points,
    wandb_records,
)

FIRST_SEQ = 1 << 62  # sequence numbers of these points: above those of any log, the same whenever a file is read again
MOST_RECORDS = 1 << 20  # of one file
FILES = 200
TRAINER_STATE = "trainer_state.json"
MOST_FOLDERS = 4000
MOST_ENTRIES = 2000  # of one folder; a larger one below the first holds data
MOST_DEPTH = 12
_SKIPPED = {
    ".git", ".cache", ".cloudtrain", ".venv", ".mypy_cache", ".pytest_cache", ".ipynb_checkpoints", "__pycache__",
    "site-packages", "node_modules", "venv", "lost+found",
}  # fmt: skip
_ENVIRONMENTS = {"pyvenv.cfg", "conda-meta"}  # what an environment's folder holds
_CHECKPOINT = re.compile(r"(?:^|/)checkpoint-(\d{1,12})$")
_EVENT_FILE = re.compile(
    r"(?:^|/)(?:events\.out\.tfevents\.[^/]+|offline-run-[^/]+/run-[^/]+\.wandb|[0-9a-f]{32}/metrics/.+)$"
)
_CREATED = re.compile(  # seconds since 1970 and the writer's number in its process; W&B: date and time
    r"tfevents\.(\d{1,10})(?:\..*?(\d{1,9})(?:\.v2)?)?$|offline-run-(\d{8}_\d{6})"
)


MLFLOW = re.compile(r"(?:^|/)[0-9a-f]{32}/metrics/(.+)$")  # the name of a metric may hold slashes


class Kind(IntEnum):
    """Who wrote a file; of a metric that several wrote the first one's points are taken."""

    TENSORBOARD = 0
    WANDB = 1
    MLFLOW = 2
    TRAINER = 3

    @staticmethod
    def of(name: str) -> Kind:
        """Return the kind of a file by its name."""
        if name.endswith(".wandb"):
            return Kind.WANDB
        if name.endswith(TRAINER_STATE):
            return Kind.TRAINER
        return Kind.MLFLOW if MLFLOW.search(name) else Kind.TENSORBOARD


class Point(NamedTuple):
    """One metric value of a file; `seq` is unique in its attempt."""

    seq: int
    at: str
    step: int
    name: str
    value: float
    epoch: float | None = None


class Slot(NamedTuple):
    """A file's slot: the first sequence number of its points, and the prefix of its tags."""

    seq: int
    prefix: str = ""


def is_event_file(name: str) -> bool:
    """Return whether a path below a run's outputs is a file of TensorBoard, W&B or MLflow."""
    return _EVENT_FILE.search(name) is not None


def sort_key(name: str) -> tuple[int, int, str]:
    """Return a key that sorts files, named relative to the outputs, by the time when they were created."""
    match = _CREATED.search(name)
    if match is None:
        return 0, 0, name
    if match[3]:
        try:
            return int(datetime.strptime(match[3] + "+0000", "%Y%m%d_%H%M%S%z").timestamp()), 0, name
        except ValueError:
            return 0, 0, name
    return int(match[1]), int(match[2] or 0), name


class TagPrefixes:
    """Tag prefixes for the folders in which one attempt wrote event files.

    Tags of the first folder have no prefix, those of a later one get its name, as in TensorBoard. So a new folder changes
    no name that is in use.
    """

    def __init__(self) -> None:
        self._assigned: dict[Kind, dict[str, str]] = {}

    def prefix(self, name: str) -> str:
        """Return the prefix for the tags of a file, which is named relative to the outputs."""
        if name.endswith(".wandb"):
            return ""
        folder, assigned = _run_folder(name), self._assigned.setdefault(Kind.of(name), {})
        if folder not in assigned:
            assigned[folder] = _unique_prefix(folder, assigned)
        return assigned[folder]

    def keep(self, name: str, prefix: str) -> None:
        """Restore the prefix that a file's folder had before, unless another folder has it."""
        assigned = self._assigned.setdefault(Kind.of(name), {})
        if not name.endswith(".wandb") and prefix not in assigned.values():
            assigned.setdefault(_run_folder(name), prefix)


def _run_folder(name: str) -> str:
    """Return the folder that a tool calls a run."""
    return name.rpartition("/metrics/" if MLFLOW.search(name) else "/")[0]


class SlotTable:
    """The slots of one attempt's files; a slot that was assigned never changes."""

    def __init__(self) -> None:
        self._assigned: dict[str, Slot] = {}
        self._taken: set[int] = set()
        self._folders = TagPrefixes()

    def assign(
        self, names: Iterable[str], find_prefix: Callable[[str, int], str | None] = lambda name, seq: None
    ) -> dict[str, Slot]:
        """Return file name -> slot, sorted by the time when the files were created; new files get theirs in this order.

        Args:
            names: Files, relative to the outputs.
            find_prefix: Returns the prefix with which a file was read before, None where it was not.
        """
        named = sorted(names, key=sort_key)
        new = {name: FIRST_SEQ + (self._slot(name) << 20) for name in named if name not in self._assigned}
        for name, seq in new.items():
            if (prefix := find_prefix(name, seq)) is not None:
                self._folders.keep(name, prefix)
        for name, seq in new.items():
            self._assigned[name] = Slot(seq, self._folders.prefix(name))
        return {name: self._assigned[name] for name in named}

    def _slot(self, name: str) -> int:
        began, number, _ = sort_key(name)
        slot = began % (1 << 32) << 10 | (number % 32) << 5 | zlib.crc32(name.encode("utf-8", "surrogateescape")) % 32
        while slot in self._taken:
            slot = (slot + 1) % (1 << 42)
        self._taken.add(slot)
        return slot


def assign_slots(names: Iterable[str]) -> dict[str, Slot]:
    """Return file name -> slot for files of an attempt that has no slots yet."""
    return SlotTable().assign(names)


def _unique_prefix(folder: str, prefixes: dict[str, str]) -> str:
    """Return a unique prefix for a folder: its path relative to what it shares with the first folder."""
    if not prefixes:
        return ""
    first = next((name for name, prefix in prefixes.items() if not prefix), next(iter(prefixes)))
    shared = posixpath.commonpath([first or ".", folder or "."]) if first and folder else ""
    prefix = _storable(f"{posixpath.relpath(folder or '.', shared or '.')}/")
    if prefix in prefixes.values():
        prefix = _storable(f"{folder or '.'}/")
    while prefix in prefixes.values():  # the same folder as a longer path
        prefix = f"./{prefix}"
    return prefix


def _storable(name: str) -> str:
    """Return a file name that SQLite can store, whatever its bytes are."""
    return name.encode("utf-8", "replace").decode()


def read_points(name: str, data: bytes, slot: Slot) -> list[Point]:
    """Parse the bytes of a whole file; sequence numbers as in Reader, tags without prefix."""
    return Reader(Path(name), slot._replace(prefix="")).parse(data)


def former_prefix(path: Path, seq: int, stored_point: tuple[int, str]) -> str | None:
    """Return the tag prefix with which a file was read before, None where it cannot be derived. Blocking.

    `stored_point` is sequence number and name of one of its points in the history.
    """
    number, name = stored_point
    tags = [point.name for point in Reader(path, Slot(seq)).read() if point.seq == number and name.endswith(point.name)]
    prefix = name.removesuffix(max(tags, key=len)) if tags else name
    return prefix if tags and (not prefix or prefix.endswith("/")) else None


class Reader:
    """Reads one file incrementally: `read` returns new points. Blocking; stops at the first damaged record.

    Args:
        path: The file; it may be replaced by a newer one of the same kind.
        slot: Its sequence numbers and the prefix of its tags.
        after: Of Trainer's state the step up to which the rows are of an earlier attempt.
    """

    def __init__(self, path: Path, slot: Slot, after: int = 0) -> None:
        self.path, self._slot, self._after = path, slot, after
        self._records, self._offset, self._broken = 0, 0, False
        self._read_state: tuple[Path, int, int] | None = None

    def read(self) -> list[Point]:
        if self._broken:
            return []
        try:
            if self.path.name == TRAINER_STATE:
                return self._read_trainer_state()
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read(MOST_BYTES)
        except OSError:
            self._broken = True
            return []
        return self.parse(data)

    def parse(self, data: bytes) -> list[Point]:
        """Parse the bytes that follow those of the last call; an incomplete record waits for the next call."""
        points: list[Point] = []
        try:
            for scalars, end in self._records_of(data):
                self._offset = end
                self._records += 1
                if self._records >= MOST_RECORDS:
                    raise ValueError("too many records")
                points += self._points(self._records, scalars)
        except (ValueError, struct.error, IndexError, RecursionError, OverflowError):
            self._broken = True
        return points

    def _records_of(self, data: bytes) -> Iterator[tuple[Iterable[Scalar], int]]:
        """Yield the numbers of each record, and the offset behind it."""
        if match := MLFLOW.search(self.path.as_posix()):
            yield from ((mlflow_points(match[1], line), end) for line, end in mlflow_records(data, self._offset))
        elif self.path.name.endswith(".wandb"):
            yield from ((wandb_points(record), end) for record, end in wandb_records(data, self._offset))
        else:
            yield from ((tensorboard_points(record), end) for record, end in tensorboard_records(data, self._offset))

    def _points(self, record: int, scalars: Iterable[Scalar]) -> list[Point]:
        seq, prefix = self._slot.seq + record, self._slot.prefix
        return [Point(seq, at, step, prefix + name, value, epoch) for at, step, name, value, epoch in scalars]

    def _read_trainer_state(self) -> list[Point]:
        """Return the rows that Trainer has added; it writes the whole file anew, into each checkpoint. Raises OSError."""
        status = self.path.stat()
        state = (self.path, status.st_mtime_ns, status.st_size)
        if state == self._read_state or status.st_size > MOST_BYTES:
            return []
        self._read_state = state
        points: list[Point] = []
        for number, scalars in enumerate(trainer_points(self.path.read_bytes(), status.st_mtime), 1):
            if self._records < number < MOST_RECORDS:
                self._records = number
                points += self._points(number, (scalar for scalar in scalars if scalar.step > self._after))
        return points


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
