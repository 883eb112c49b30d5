"""Read an iterable dataset with several readers, each its own shards, where the dataset offers that.

`datasets` has `shard` and `num_shards`. A dataset of torch may ask `torch.utils.data.get_worker_info()` which part of the
samples it yields: a reader takes the place of a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ..errors import Unsupported

SHARDS, WORKERS = "shards", "workers"


class ReaderInfo:
    """What get_worker_info() returns in a reader; it keeps which of its numbers were asked for."""

    seed, rng, worker_method = 0, None, None

    def __init__(self, index: int, count: int, dataset: Any) -> None:
        self._index, self._count, self.dataset = index, count, dataset
        self.asked: set[str] = set()

    @property
    def id(self) -> int:
        self.asked.add("id")
        return self._index

    @property
    def num_workers(self) -> int:
        self.asked.add("num_workers")
        return self._count


def offer(data: Any, count: int) -> tuple[str, str]:
    """Return how a dataset is divided among so many readers, or "" and why it is not.

    One sample may be read to find out.
    """
    if count == 1:
        return "", ""
    shards = getattr(data, "num_shards", None)
    if isinstance(shards, int) and hasattr(data, "shard"):
        if shards % count == 0:
            return SHARDS, ""
        return "", f"its {shards} shards are no multiple of {count}"
    info = ReaderInfo(0, count, data)
    try:
        with seen(info):
            next(iter(data), None)
    except Unsupported as error:
        return "", str(error)
    if info.asked == {"id", "num_workers"}:
        return WORKERS, ""
    return "", "its __iter__ does not ask get_worker_info() for a part, and it has no num_shards"


def reader(data: Any, how: str, index: int, count: int) -> Iterator[Any]:
    """Return the samples of one of so many readers, in their order."""
    if how == SHARDS:
        return iter(data.shard(num_shards=count, index=index))
    return iter(data) if count == 1 else _as_worker(data, ReaderInfo(index, count, data))


def _as_worker(data: Any, info: ReaderInfo) -> Iterator[Any]:
    with seen(info):
        source = iter(data)
    end = object()
    while True:
        with seen(info):
            sample = next(source, end)
        if sample is end:
            return
        yield sample


@contextmanager
def seen(info: ReaderInfo) -> Iterator[None]:
    """Let get_worker_info() return `info`; raises Unsupported where this version of torch does not.

    torch has only a private name for it. A DataLoader would start one process for each reader on each rank, of which a
    rank needs one. Modules import get_worker_info by name, so another function in its place would not be called.
    """
    from torch.utils.data import _utils

    worker: Any = getattr(_utils, "worker", _utils)
    before = getattr(worker, "_worker_info", None)
    worker._worker_info = info
    try:
        if get_worker_info() is not info:
            raise Unsupported(f"torch {torch.__version__} does not let get_worker_info() return a rank's part")
        yield
    finally:
        worker._worker_info = before
