"""What a usage event says of a node. Any rank can print such an event: what does not fit is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_GPUS = 64  # of one node that are listened to


@dataclass(frozen=True)
class Gpu:
    """The use of one GPU; None is what was not told."""

    index: int
    percent: float | None
    memory_bytes: float | None
    memory_total_bytes: float | None


@dataclass(frozen=True)
class Usage:
    """The use of one node, in percent of one processor and in bytes; None is what was not told."""

    cpu_percent: float | None
    rss_bytes: float | None
    gpus: tuple[Gpu, ...]

    def __bool__(self) -> bool:
        return self != _NOTHING


_NOTHING = Usage(None, None, ())


def read(data: Mapping[str, Any]) -> Usage:
    """Return what a usage event's data say: finite numbers that are not negative, and GPUs that tell any of theirs."""
    told = data.get("gpus")
    rows = [row for row in told if isinstance(row, Mapping)] if isinstance(told, list) else []
    gpus = [_gpu(at, row) for at, row in enumerate(rows[:MOST_GPUS])]
    known = tuple(gpu for gpu in gpus if (gpu.percent, gpu.memory_bytes, gpu.memory_total_bytes) != (None, None, None))
    return Usage(_amount(data, "cpu_percent"), _amount(data, "rss_bytes"), known)


def _gpu(at: int, row: Mapping[str, Any]) -> Gpu:
    index = _amount(row, "index")
    amounts = (_amount(row, name) for name in ("percent", "memory_bytes", "memory_total_bytes"))
    return Gpu(int(index) if index is not None and index < 1000 else at, *amounts)


def _amount(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        amount = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None
