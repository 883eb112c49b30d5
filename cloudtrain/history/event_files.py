"""Reads metrics from TensorBoard event files and offline W&B runs, without either package.

A file is read incrementally: the next read continues where the last one stopped, and a record that is only half written
waits for it. Files of another format are skipped.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from cloudtrain.job.units import format_time

FIRST_SEQ = 1 << 62  # sequence numbers of these points: above those of any log, the same whenever a file is read again
MOST_RECORDS = 1 << 20  # of one file
MOST_BYTES = 64 << 20  # of one record
FILES = 200
_BLOCK = 32 << 10  # of a W&B file, which is a LevelDB log
_CREATED = re.compile(  # seconds since 1970 and the writer's number in its process; W&B: date and time
    r"tfevents\.(\d{1,10})(?:\..*?(\d{1,9})(?:\.v2)?)?$|offline-run-(\d{8}_\d{6})"
)
_WANDB = b":W&B\xe1\xbe"


class Point(NamedTuple):
    """One metric value of a file; `seq` is unique in its attempt."""

    seq: int
    at: str
    step: int
    name: str
    value: float


class Slot(NamedTuple):
    """A file's slot: the first sequence number of its points, and the prefix of its tags."""

    seq: int
    prefix: str = ""


def list_files(outputs: Path, since: float) -> list[Path]:
    """List event files below a folder that changed since a time (seconds since 1970), at most FILES."""
    if not outputs.is_dir():
        return []
    paths = [*outputs.rglob("events.out.tfevents.*"), *outputs.rglob("offline-run-*/run-*.wandb")]
    return sorted(
        (path for path in paths if _modified_at(path) >= since),
        key=lambda path: sort_key(path.relative_to(outputs).as_posix()),
    )[:FILES]


def _modified_at(path: Path) -> float:
    """Return the modification time of a file; -1 where it is no regular file or is gone."""
    try:
        status = path.stat()
    except OSError:
        return -1.0
    return status.st_mtime if stat.S_ISREG(status.st_mode) else -1.0


def is_event_file(name: str) -> bool:
    """Return whether a path below a run's outputs is a TensorBoard or W&B file."""
    return re.search(r"(^|/)(events\.out\.tfevents\.[^/]+|offline-run-[^/]+/run-[^/]+\.wandb)$", name) is not None


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
        self._assigned: dict[str, str] = {}

    def prefix(self, name: str) -> str:
        """Return the prefix for the tags of a file, which is named relative to the outputs."""
        if name.endswith(".wandb"):
            return ""
        folder = name.rpartition("/")[0]
        if folder not in self._assigned:
            self._assigned[folder] = _unique_prefix(folder, self._assigned)
        return self._assigned[folder]

    def keep(self, name: str, prefix: str) -> None:
        """Restore the prefix that a file's folder had before, unless another folder has it."""
        if not name.endswith(".wandb") and prefix not in self._assigned.values():
            self._assigned.setdefault(name.rpartition("/")[0], prefix)


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
    """Reads one file incrementally: `read` returns new points. Blocking; stops at the first damaged record."""

    def __init__(self, path: Path, slot: Slot) -> None:
        self._path, self._slot = path, slot
        self._records, self._offset, self._broken = 0, 0, False

    def read(self) -> list[Point]:
        if self._broken:
            return []
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read(MOST_BYTES)
        except OSError:
            self._broken = True
            return []
        return self.parse(data)

    def parse(self, data: bytes) -> list[Point]:
        """Parse the bytes that follow those of the last call; an incomplete record waits for the next call."""
        points: list[Point] = []
        wandb = self._path.name.endswith(".wandb")
        try:
            for record, end in (_wandb_records if wandb else _tensorboard_records)(data, self._offset):
                self._offset = end
                self._records += 1
                if self._records >= MOST_RECORDS:
                    raise ValueError("too many records")
                for at, step, name, value in (_wandb_points if wandb else _tensorboard_points)(record):
                    points.append(Point(self._slot.seq + self._records, at, step, self._slot.prefix + name, value))
        except (ValueError, struct.error, IndexError, RecursionError, OverflowError):
            self._broken = True
        return points


def _tensorboard_records(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield TensorBoard records (length, checksum, bytes, checksum) with the offset after each."""
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if size > MOST_BYTES:
            raise ValueError("no event file")
        if at + 16 + size > len(data):
            return
        yield data[at + 12 : at + 12 + size], offset + at + 16 + size
        at += 16 + size


def _tensorboard_points(record: bytes) -> Iterator[tuple[str, int, str, float]]:
    at, step, summary = 0.0, 0, b""
    for number, value in _proto_fields(record):
        if number == 1 and isinstance(value, bytes):
            (at,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            summary = value
    for number, value in _proto_fields(summary):
        if number == 1 and isinstance(value, bytes):
            name, scalar = _scalar_summary(value)
            if name and scalar is not None:
                yield _iso_time(at), step, name, scalar


def _scalar_summary(message: bytes) -> tuple[str, float | None]:
    """Return tag and value of a summary; TensorFlow 2 writes scalars as tensors."""
    name, scalar = "", None
    for number, value in _proto_fields(message):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            name = value.decode("utf-8", "replace")
        elif number == 2:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8:
            tensor = dict(_proto_fields(value))
            content = tensor.get(4) or tensor.get(5)
            if tensor.get(1) == 1 and isinstance(content, bytes) and len(content) == 4:  # one float32
                (scalar,) = struct.unpack("<f", content)
    return name, scalar


def _wandb_records(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield the records of a W&B file (LevelDB log format) with the offset after each."""
    at = 0
    if offset == 0:
        if len(data) < 7:
            return
        if data[:6] != _WANDB:
            raise ValueError("no W&B file")
        at = 7
    whole = b""
    while True:
        left = _BLOCK - (offset + at) % _BLOCK
        if left < 7:
            at += left
            continue
        if at + 7 > len(data):
            return
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0 or kind > 4:
            raise ValueError("no W&B record")
        if at + 7 + size > len(data):
            return
        whole = data[at + 7 : at + 7 + size] if kind in (1, 2) else whole + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last fragment
            yield whole, offset + at


def _wandb_points(record: bytes) -> Iterator[tuple[str, int, str, float]]:
    """Yield the numbers of a W&B history row; names with an underscore are W&B's own."""
    for number, value in _proto_fields(record):
        if number != 2 or not isinstance(value, bytes):
            continue
        row: dict[str, float] = {}
        step = 0
        for inner, item in _proto_fields(value):
            if inner == 1 and isinstance(item, bytes):
                row.update(_wandb_item(item))
            elif inner == 2 and isinstance(item, bytes):
                step = next((value for key, value in _proto_fields(item) if key == 1 and isinstance(value, int)), 0)
        moment = _iso_time(row.get("_timestamp", 0.0))
        step = int(row.get("_step", step))
        yield from ((moment, step, name, value) for name, value in row.items() if not name.startswith("_"))


def _wandb_item(message: bytes) -> Iterator[tuple[str, float]]:
    key, nested, text = "", list[str](), ""
    for number, value in _proto_fields(message):
        if isinstance(value, bytes):
            decoded = value.decode("utf-8", "replace")
            if number == 1:
                key = decoded
            elif number == 2:
                nested.append(decoded)
            elif number == 16:
                text = decoded
    parsed = json.loads(text or "null")
    if isinstance(parsed, int | float) and not isinstance(parsed, bool):
        yield key or ".".join(nested), float(parsed)


def _proto_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of a protocol buffer's fields; fixed-size fields as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("no protocol buffer")
        if at + size > len(message):
            raise ValueError("no protocol buffer")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("no number")


def _iso_time(seconds: float) -> str:
    if not math.isfinite(seconds) or not 0 <= seconds < 4e9:
        seconds = 0.0
    return format_time(seconds)
