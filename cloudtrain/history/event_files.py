"""Metrics that a script left in files of other tools: TensorBoard's event files, and the folders of an offline W&B run.

Both formats are read here, a few fields of each, so that neither package is needed. A file is read on from where it was
left; a record that is still being written waits for the next look. Files of another form are passed over.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

FIRST_SEQ = 1 << 62  # numbers of such points: behind those of any log, the same whenever a file is read again
MOST_RECORDS = 1 << 20  # of one file
MOST_BYTES = 64 << 20  # of one record
FILES = 200
_BLOCK = 32 << 10  # of a W&B file, which is a LevelDB log
_BEGUN = re.compile(  # seconds since 1970, and which one it is of its process; W&B tells a day and a time
    r"tfevents\.(\d{1,10})(?:\..*?(\d{1,9})(?:\.v2)?)?$|offline-run-(\d{8}_\d{6})"
)
_WANDB = b":W&B\xe1\xbe"


class Point(NamedTuple):
    """One number out of a file; `seq` tells it from all others of its attempt."""

    seq: int
    at: str
    step: int
    name: str
    value: float


class Place(NamedTuple):
    """A file's place among the others: what its points' numbers begin with, and what stands before its tags."""

    seq: int
    prefix: str = ""


def files(outputs: Path, since: float) -> list[Path]:
    """Return the files below a folder that were written since a moment (seconds since 1970), at most FILES."""
    if not outputs.is_dir():
        return []
    found = [*outputs.rglob("events.out.tfevents.*"), *outputs.rglob("offline-run-*/run-*.wandb")]
    return sorted(
        (path for path in found if _touched(path) >= since),
        key=lambda path: order(path.relative_to(outputs).as_posix()),
    )[:FILES]


def _touched(path: Path) -> float:
    """Return when a file was written last; before all time for what is none, or is gone since it was found."""
    try:
        found = path.stat()
    except OSError:
        return -1.0
    return found.st_mtime if stat.S_ISREG(found.st_mode) else -1.0


def is_one(name: str) -> bool:
    """Return whether a name below a run's outputs is that of such a file."""
    return re.search(r"(^|/)(events\.out\.tfevents\.[^/]+|offline-run-[^/]+/run-[^/]+\.wandb)$", name) is not None


def order(name: str) -> tuple[int, int, str]:
    """Return the key by which files, named from the outputs on, stand in the order in which they were begun."""
    found = _BEGUN.search(name)
    if found is None:
        return 0, 0, name
    if found[3]:
        try:
            return int(datetime.strptime(found[3] + "+0000", "%Y%m%d_%H%M%S%z").timestamp()), 0, name
        except ValueError:
            return 0, 0, name
    return int(found[1]), int(found[2] or 0), name


class Folders:
    """The folders in which one attempt wrote event files, asked for in the order of their files.

    The first keeps its tags; those of a later one get its name, as TensorBoard shows it. So a folder that appears later
    changes no name that is in use.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def prefix(self, name: str) -> str:
        """Return what stands before the tags of a file, which has its name from the outputs on."""
        if name.endswith(".wandb"):
            return ""
        folder = name.rpartition("/")[0]
        if folder not in self._known:
            self._known[folder] = _prefix(folder, self._known)
        return self._known[folder]

    def keep(self, name: str, prefix: str) -> None:
        """Give a file's folder the prefix that it had before, unless another folder has it."""
        if not name.endswith(".wandb") and prefix not in self._known.values():
            self._known.setdefault(name.rpartition("/")[0], prefix)


class Places:
    """The places of one attempt's files, found one after another: a place that was given is never another one."""

    def __init__(self) -> None:
        self._known: dict[str, Place] = {}
        self._taken: set[int] = set()
        self._folders = Folders()

    def of(
        self, names: Iterable[str], told: Callable[[str, int], str | None] = lambda name, seq: None
    ) -> dict[str, Place]:
        """Return the place of every file, by its name from the outputs on, in the order of their beginnings; new ones get
        theirs in that order too. `told` is asked with what prefix a file was read before, if it was."""
        named = sorted(names, key=order)
        new = {name: FIRST_SEQ + (self._slot(name) << 20) for name in named if name not in self._known}
        for name, seq in new.items():
            if (prefix := told(name, seq)) is not None:
                self._folders.keep(name, prefix)
        for name, seq in new.items():
            self._known[name] = Place(seq, self._folders.prefix(name))
        return {name: self._known[name] for name in named}

    def _slot(self, name: str) -> int:
        began, number, _ = order(name)
        slot = began % (1 << 32) << 10 | (number % 32) << 5 | zlib.crc32(name.encode("utf-8", "surrogateescape")) % 32
        while slot in self._taken:
            slot = (slot + 1) % (1 << 42)
        self._taken.add(slot)
        return slot


def places(names: Iterable[str]) -> dict[str, Place]:
    """Return the place of every file of an attempt where none was given before."""
    return Places().of(names)


def _prefix(folder: str, known: dict[str, str]) -> str:
    """Return what tells a folder from the ones before it: its path from where it and the first one part."""
    if not known:
        return ""
    first = next((name for name, prefix in known.items() if not prefix), next(iter(known)))
    shared = posixpath.commonpath([first or ".", folder or "."]) if first and folder else ""
    prefix = _written(f"{posixpath.relpath(folder or '.', shared or '.')}/")
    if prefix in known.values():
        prefix = _written(f"{folder or '.'}/")
    while prefix in known.values():  # the same folder, said at greater length
        prefix = f"./{prefix}"
    return prefix


def _written(name: str) -> str:
    """Return the name of a file as the history can hold it, whatever its bytes are."""
    return name.encode("utf-8", "replace").decode()


def read_whole(name: str, data: bytes, place: Place) -> list[Point]:
    """Return the points of a file that was read elsewhere, with the numbers that Reader gives them, under plain tags."""
    return Reader(Path(name), place._replace(prefix="")).take(data)


def former_prefix(path: Path, seq: int, kept: tuple[int, str]) -> str | None:
    """Return what stood before the tags of a file when it was read before, from the number and name that one of its points
    was kept under; None where that cannot be told. Blocking."""
    number, name = kept
    tags = [
        point.name for point in Reader(path, Place(seq)).read() if point.seq == number and name.endswith(point.name)
    ]
    prefix = name.removesuffix(max(tags, key=len)) if tags else name
    return prefix if tags and (not prefix or prefix.endswith("/")) else None


class Reader:
    """Reads one file, again and again: `read` returns what is new. Blocking; a damaged file ends where it is damaged."""

    def __init__(self, path: Path, place: Place) -> None:
        self._path, self._place = path, place
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
        return self.take(data)

    def take(self, data: bytes) -> list[Point]:
        """Return the points of the bytes that follow what was taken before; a record that ends behind them waits."""
        found: list[Point] = []
        wandb = self._path.name.endswith(".wandb")
        try:
            for record, end in (_logged if wandb else _framed)(data, self._offset):
                self._offset = end
                self._records += 1
                if self._records >= MOST_RECORDS:
                    raise ValueError("too many records")
                for at, step, name, value in (_history if wandb else _scalars)(record):
                    found.append(Point(self._place.seq + self._records, at, step, self._place.prefix + name, value))
        except (ValueError, struct.error, IndexError, RecursionError, OverflowError):
            self._broken = True
        return found


def _framed(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield TensorBoard's records (length, check sum, bytes, check sum) with the offset behind each."""
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if size > MOST_BYTES:
            raise ValueError("no event file")
        if at + 16 + size > len(data):
            return
        yield data[at + 12 : at + 12 + size], offset + at + 16 + size
        at += 16 + size


def _scalars(record: bytes) -> Iterator[tuple[str, int, str, float]]:
    at, step, summary = 0.0, 0, b""
    for number, value in _fields(record):
        if number == 1 and isinstance(value, bytes):
            (at,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            summary = value
    for number, value in _fields(summary):
        if number == 1 and isinstance(value, bytes):
            name, scalar = _scalar(value)
            if name and scalar is not None:
                yield _moment(at), step, name, scalar


def _scalar(message: bytes) -> tuple[str, float | None]:
    """Return name and value of a summary; TensorFlow 2 writes its numbers as tensors."""
    name, scalar = "", None
    for number, value in _fields(message):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            name = value.decode("utf-8", "replace")
        elif number == 2:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8:
            tensor = dict(_fields(value))
            content = tensor.get(4) or tensor.get(5)
            if tensor.get(1) == 1 and isinstance(content, bytes) and len(content) == 4:  # one float32
                (scalar,) = struct.unpack("<f", content)
    return name, scalar


def _logged(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield the records of a W&B file, whose pieces stand in blocks, with the offset behind each."""
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
        if kind in (1, 4):  # whole, or its last piece
            yield whole, offset + at


def _history(record: bytes) -> Iterator[tuple[str, int, str, float]]:
    """Yield the numbers of a row that was logged to W&B; those of its own begin with an underscore."""
    for number, value in _fields(record):
        if number != 2 or not isinstance(value, bytes):
            continue
        row: dict[str, float] = {}
        step = 0
        for inner, item in _fields(value):
            if inner == 1 and isinstance(item, bytes):
                row.update(_item(item))
            elif inner == 2 and isinstance(item, bytes):
                step = next((found for key, found in _fields(item) if key == 1 and isinstance(found, int)), 0)
        moment = _moment(row.get("_timestamp", 0.0))
        step = int(row.get("_step", step))
        yield from ((moment, step, name, found) for name, found in row.items() if not name.startswith("_"))


def _item(message: bytes) -> Iterator[tuple[str, float]]:
    key, nested, text = "", list[str](), ""
    for number, value in _fields(message):
        if isinstance(value, bytes):
            word = value.decode("utf-8", "replace")
            if number == 1:
                key = word
            elif number == 2:
                nested.append(word)
            elif number == 16:
                text = word
    parsed = json.loads(text or "null")
    if isinstance(parsed, int | float) and not isinstance(parsed, bool):
        yield key or ".".join(nested), float(parsed)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of a protocol buffer's fields; fixed-size ones as their bytes."""
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


def _moment(seconds: float) -> str:
    if not math.isfinite(seconds) or not 0 <= seconds < 4e9:
        seconds = 0.0
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
