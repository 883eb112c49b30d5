"""Metrics that a script left in files of other tools: TensorBoard's event files, and the folders of an offline W&B run.

Both formats are read here, a few fields of each, so that neither package is needed. A file is read on from where it was
left; a record that is still being written waits for the next look. Files of another form are passed over.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

FIRST_SEQ = 1 << 52  # numbers of such points: behind those of any log, the same whenever a file is read again
MOST_RECORDS = 1 << 20  # of one file
MOST_BYTES = 64 << 20  # of one record
FILES = 200
_BLOCK = 32 << 10  # of a W&B file, which is a LevelDB log
_WANDB = b":W&B\xe1\xbe"


class Point(NamedTuple):
    """One number out of a file; `seq` tells it from all others of its attempt."""

    seq: int
    at: str
    step: int
    name: str
    value: float


def files(outputs: Path, since: float) -> list[Path]:
    """Return the files below a folder that were written since a moment (seconds since 1970), at most FILES."""
    if not outputs.is_dir():
        return []
    found = [*outputs.rglob("events.out.tfevents.*"), *outputs.rglob("offline-run-*/run-*.wandb")]
    return sorted(path for path in found if path.is_file() and path.stat().st_mtime >= since)[:FILES]


def is_one(name: str) -> bool:
    """Return whether a name below a run's outputs is that of such a file."""
    return re.search(r"(^|/)(events\.out\.tfevents\.[^/]+|offline-run-[^/]+/run-[^/]+\.wandb)$", name) is not None


def read_whole(name: str, data: bytes) -> list[Point]:
    """Return the points of a file that was read elsewhere, with the numbers that Reader gives them."""
    return Reader(Path(name), name).take(data)


class Reader:
    """Reads one file, again and again: `read` returns what is new. Blocking; a damaged file ends where it is damaged."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._seq = FIRST_SEQ | (zlib.crc32(name.encode("utf-8", "surrogateescape")) << 20)
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
                    found.append(Point(self._seq + self._records, at, step, name, value))
        except (ValueError, struct.error, IndexError):
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
