"""Read an iterable dataset with several readers, each its own shards, where the dataset offers that.

`datasets` has `shard` and `num_shards`. A dataset of torch may ask `torch.utils.data.get_worker_info()` which part of the
samples it yields: a reader takes the place of a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker

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
    with _set(info):
        next(iter(data), None)
    if info.asked == {"id", "num_workers"}:
        return WORKERS, ""
    return "", "its __iter__ does not ask get_worker_info() for a part, and it has no num_shards"


def reader(data: Any, how: str, index: int, count: int) -> Iterator[Any]:
    """Return the samples of one of so many readers, in their order."""
    if how == SHARDS:
        return iter(data.shard(num_shards=count, index=index))
    return iter(data) if count == 1 else _as_worker(data, ReaderInfo(index, count, data))


def _as_worker(data: Any, info: ReaderInfo) -> Iterator[Any]:
    with _set(info):
        source = iter(data)
    end = object()
    while True:
        with _set(info):
            sample = next(source, end)
        if sample is end:
            return
        yield sample


@contextmanager
def _set(info: ReaderInfo) -> Iterator[None]:
    before, worker._worker_info = worker._worker_info, info  # type: ignore[assignment]
    try:
        yield
    finally:
        worker._worker_info = before
