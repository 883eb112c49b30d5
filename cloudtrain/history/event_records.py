"""Reads the records of files that TensorBoard, W&B, MLflow and transformers' Trainer write, without these packages."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from cloudtrain.job.units import format_time

MOST_BYTES = 64 << 20  # of one record
_BLOCK = 32 << 10  # of a W&B file, which is a LevelDB log
_WANDB = b":W&B\xe1\xbe"


class Scalar(NamedTuple):
    """One number of a record."""

    at: str
    step: int
    name: str
    value: float
    epoch: float | None = None


def tensorboard_records(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
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


def tensorboard_points(record: bytes) -> Iterator[Scalar]:
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
                yield Scalar(iso_time(at), step, name, scalar)


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


def wandb_records(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
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


def wandb_points(record: bytes) -> Iterator[Scalar]:
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
        moment = iso_time(row.get("_timestamp", 0.0))
        step = int(row.get("_step", step))
        yield from (Scalar(moment, step, name, value) for name, value in row.items() if not name.startswith("_"))


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


def mlflow_records(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file of MLflow's file store with the offset after each."""
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        yield data[at:end], offset + end + 1
        at = end + 1


def mlflow_points(name: str, line: bytes) -> Iterator[Scalar]:
    """Yield the number of one line: milliseconds since 1970, value, step (none before MLflow 1.0).

    Source: mlflow/store/tracking/file_store.py, _get_metric_from_line, 2026-11-23.
    """
    words = line.split()
    if len(words) >= 2:
        yield Scalar(iso_time(int(words[0]) / 1000), int(words[2]) if len(words) > 2 else 0, name, float(words[1]))


def trainer_points(data: bytes, written_at: float) -> Iterator[list[Scalar]]:
    """Yield the numbers of each row of Trainer's `log_history`; a file that is being written has none."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return
    rows = state.get("log_history") if isinstance(state, dict) else None
    for row in rows if isinstance(rows, list) else ():
        numbers = {name: value for name, value in row.items() if _is_number(value)} if isinstance(row, dict) else {}
        step, epoch = numbers.pop("step", 0), numbers.pop("epoch", None)
        whole = int(step) if abs(step) < 1 << 62 else 0  # not so for NaN
        numbers.pop("total_flos", None)  # its lines do not have it
        yield [Scalar(iso_time(written_at), whole, name, float(value), epoch) for name, value in numbers.items()]


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000
    )


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


def iso_time(seconds: float) -> str:
    if not math.isfinite(seconds) or not 0 <= seconds < 4e9:
        seconds = 0.0
    return format_time(seconds)
