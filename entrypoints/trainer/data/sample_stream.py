"""One rank's samples of the user's own data: by index, or of an iterable dataset as they come; and what tasks of them share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset, IterableDataset

from .. import collectives
from ..errors import Unsupported
from . import shards
from .samples import EMPTY
from .stream import StreamBatches
from .tasks import Task, moved, weighed

MISSING = object()  # where a reader has ended


class Samples(Dataset[Any]):
    """The data, each sample with whether it counts; a rank that has none left in the last batch gets one that does not."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return index != EMPTY, self.sample(max(index, 0))

    def sample(self, index: int) -> Any:
        """Return one of the data; of a stream, which has no other without being read, the first."""
        return next(iter(self.data)) if isinstance(self.data, IterableDataset) else self.data[index]


class SampleStream(StreamBatches):
    """One rank's micro-batches of an iterable dataset.

    The samples of the readers (shards.py) are taken in turns: sample t of an epoch is the next one of reader t mod
    `readers`, or missing where that has ended. So a global batch is the same on any number of ranks. A rank reads only
    the readers whose samples it takes, if the ranks divide them. The first attempt has a reader for each rank.
    """

    def __init__(self, samples: Samples, *, world: int, **batching: Any) -> None:
        self.how, self.why_whole = shards.offer(samples.data, world)
        self.readers = world if self.how else 1
        self._spare: Any = None
        super().__init__(samples, world=world, **batching)  # type: ignore[arg-type]

    @property
    def described(self) -> str:
        """How the ranks read."""
        if self.world == 1:
            return ""
        if self.readers == 1:
            return f", which each rank reads whole: {self.why_whole}"
        if self.readers % self.world:
            return f", which each rank reads whole: it has {self.readers} readers, no multiple of {self.world} ranks"
        return ", of which each rank reads its own shards"

    def place(self) -> dict[str, int]:
        """Return the place in the data that a checkpoint keeps."""
        return {"epoch": self.epoch, "samples": self.samples, "readers": self.readers}

    def go_to(self, position: Mapping[str, int]) -> None:
        """Continue from a position in the data, which is read up to there."""
        self.epoch, self.samples = position["epoch"], position["samples"]
        self.readers = position.get("readers", self.readers)
        data, count = self.texts.data, self.readers
        how = self.how or (shards.SHARDS if hasattr(data, "shard") else shards.WORKERS) if count > 1 else ""
        self.divided = count > 1 and count % self.world == 0
        self._sources: dict[int, Iterator[Any]] = {}
        for index in range(count):
            if not self.divided or index % self.world == self.rank:
                begin = -(-(self.samples - index) // count)
                self._sources[index] = islice(shards.reader(data, how, index, count), max(begin, 0), None)
        self.exhausted = False

    def windows(self) -> Iterator[int]:
        """Yield how many micro-batches the next step takes, as long as a rank has samples; collective."""
        while count := self._agreed(self._read()):
            yield count
        self.exhausted = True

    def advance(self) -> None:
        """Count the samples of one step as taken."""
        self.samples += self.global_batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            for mine in self._batch:
                empty = self.per_device - len(mine) if self.full or not mine else 0
                items = [type(self.texts)(mine)[index] for index in range(len(mine))]
                yield self.collate([*items, *[type(self.texts)([self._any()])[EMPTY]] * empty])

    def _read(self) -> int:
        """Read this rank's samples of the next global batch; return how many micro-batches have any of them."""
        share, used = self.per_device * self.world, 0
        self._batch: list[list[Any]] = []
        for number in range(self.global_batch // share):
            begin, mine = self.samples + number * share, []
            for at in range(share):
                taken = (
                    (begin + at) % self.world == self.rank if self.readers > 1 else at // self.per_device == self.rank
                )
                if (source := self._sources.get((begin + at) % self.readers)) is None or (self.divided and not taken):
                    continue
                if (sample := next(source, MISSING)) is not MISSING:
                    used = number + 1
                    mine += [sample] * taken
            self._batch.append(mine)
        return used

    def _agreed(self, used: int) -> int:
        """Return the most that a rank has read; where each reads everything that is known."""
        if not self.divided or self._group is None:
            return used
        most = torch.tensor(used)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(most)

    def _any(self) -> Any:
        """Return a sample that takes the place of a missing one."""
        if self._spare is None:
            self._spare = self.texts.sample(0)
        return self._spare


@dataclass
class OwnBatches(Task):
    """A task of the user's data and loss. A batch is the number of samples that count, and the user's own batch."""

    unit: ClassVar[str] = "samples"

    def __post_init__(self) -> None:
        self.own_collate = self.collate
        self.collate = self._collate

    def _collate(self, items: list[Any]) -> Any:
        return sum(counts for counts, _ in items), self.own_collate([item for _, item in items])

    def stream(self, **batching: Any) -> SampleStream:
        """Return this rank's batches of an iterable dataset; raises Unsupported where ranks read different ones."""
        batches = SampleStream(self.train, **batching)
        self.described += batches.described
        if batches.readers == 1:
            found = collectives.every_rank(re.sub("0x[0-9a-f]+", "", repr(self.train.sample(0))))
            if odd := [rank for rank, each in enumerate(found) if each != found[0]]:
                raise Unsupported(
                    f"rank {odd[0]} reads another first sample than rank 0: an IterableDataset yields the same samples on "
                    "each rank, or asks torch.utils.data.get_worker_info() for its part"
                )
        batches.collate = self.collate  # type: ignore[method-assign]
        return batches

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Return the batch where the model is."""
        count, own = batch
        return torch.tensor(count, device=device), moved(own, device)

    def size(self, batch: Any) -> torch.Tensor | int:
        """Return how many samples a batch has."""
        return batch[0]  # type: ignore[no-any-return]

    def losses(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, weighed so that the mean is that of the global batch."""
        return weighed(self.loss_of(model, batch[1])[0], self.count(model, batch))

    def loss_of(self, model: Any, batch: Any) -> tuple[Any, ...]:
        """Return the mean loss of the user's batch, and what else came of it."""
        raise NotImplementedError
