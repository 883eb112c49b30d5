"""Datasets, collation, and the order of batches over the ranks (GlobalBatches).

The order is one seeded permutation an epoch of all samples. Optimiser step k takes the next global batch of it, however
many ranks there are: rank r's micro-batch m holds the positions from (m * ranks + r) * size on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import Unsupported
from ..labels import IGNORED

if TYPE_CHECKING:
    from ..arguments import Arguments

# Index of a sample that teaches nothing. A rank that has none left in the last batch gets a whole micro-batch of them:
# of a single one no BatchNorm can take the variance.
EMPTY = -1

MOST_TEXT = 1 << 20  # characters that are tokenized at a time: a tokenizer takes a hundred bytes for each token

Item = dict[str, torch.Tensor]


class Blocks(Dataset[Item]):
    """A stream of tokens, cut into blocks: every token stands in exactly one. The last block is filled up with
    ignored ones, all of them on its right, where no token before can see them."""

    def __init__(self, tokens: np.ndarray[Any, np.dtype[np.int32]], block_size: int, limit: int = -1) -> None:
        blocks = math.ceil(len(tokens) / block_size)
        self.tokens = tokens if limit < 0 else tokens[: limit * block_size]
        self.block_size = block_size
        self._length = blocks if limit < 0 else min(blocks, limit)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Item:
        at = max(index, 0) * self.block_size
        ids = torch.from_numpy(self.tokens[at : at + self.block_size].astype(np.int64))
        missing = self.block_size - len(ids)
        labels = torch.full_like(ids, IGNORED) if index == EMPTY else ids
        if missing:
            ids = torch.nn.functional.pad(ids, (0, missing))
            labels = torch.nn.functional.pad(labels, (0, missing), value=IGNORED)
        return {"input_ids": ids, "labels": labels}

    def fingerprint(self) -> str:
        """Return a hash of all samples."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens)).hexdigest()


def padded(items: Sequence[Item], pad: int) -> Item:
    """Return a batch of rows, filled up on the right to the longest, with its attention mask; labels of tokens too."""
    ids = [item["input_ids"] for item in items]
    full = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(row) for row in ids])
    mask = (torch.arange(full.shape[1])[None, :] < lengths[:, None]).long()
    goals = [item["labels"] for item in items]
    if goals[0].dim():
        labels = torch.nn.utils.rnn.pad_sequence(goals, batch_first=True, padding_value=IGNORED)
    else:
        labels = torch.stack(goals)
    return {"input_ids": full, "attention_mask": mask, "labels": labels}


class GlobalBatches(Sampler[list[int]]):
    """One rank's micro-batches, by position in the whole run's order of samples.

    `samples` counts what all ranks together have taken in this epoch; with `epoch` it is the place in the data that a
    checkpoint keeps.
    """

    def __init__(
        self,
        size: int,
        per_device: int,
        accumulation: int,
        world: int,
        rank: int,
        seed: int,
        drop_last: bool,
        full: bool = False,  # fill every micro-batch up with samples that teach nothing: a pipeline wants one shape
    ) -> None:
        self.size, self.per_device, self.accumulation = size, per_device, accumulation
        self.world, self.rank, self.seed, self.drop_last = world, rank, seed, drop_last
        self.full = full
        self.global_batch = per_device * accumulation * world
        self.epoch, self.samples = 0, 0

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.global_batch if self.drop_last else math.ceil(self.size / self.global_batch)

    @property
    def passed(self) -> float:
        """Passes over the data, the part of the current one included."""
        return self.epoch + self.samples / self.size

    def place(self) -> dict[str, int]:
        """Return the place in the data that a checkpoint keeps."""
        return {"epoch": self.epoch, "samples": self.samples}

    def go_to(self, position: Mapping[str, int]) -> None:
        """Continue from a position in the data."""
        self.epoch, self.samples = position["epoch"], position["samples"]

    def windows(self) -> Iterator[int]:
        """Yield how many micro-batches each remaining step of this epoch takes."""
        begin = self.samples
        for at in range(begin, self.size, self.global_batch):
            taken = min(self.global_batch, self.size - at)
            if taken == self.global_batch or not self.drop_last:
                yield math.ceil(taken / (self.per_device * self.world))

    def advance(self) -> None:
        """Count the samples of one step as taken."""
        self.samples = min(self.samples + self.global_batch, self.size)

    @property
    def exhausted(self) -> bool:
        """Whether this epoch has no step left."""
        left = self.size - self.samples
        return left < (self.global_batch if self.drop_last else 1)

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self.epoch, self.samples = self.epoch + 1, 0

    def __iter__(self) -> Iterator[list[int]]:
        share = self.per_device * self.world
        for batch in self._global_batches():
            for at in range(0, len(batch), share):
                mine = batch[at : at + share][self.rank * self.per_device : (self.rank + 1) * self.per_device]
                yield mine + [EMPTY] * (self.per_device - len(mine) if self.full or not mine else 0)

    def _global_batches(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator)  # 8 bytes a sample, where a list would take 40
        for at in range(self.samples, self.size, self.global_batch):
            batch = order[at : at + self.global_batch].tolist()
            if not self.drop_last or len(batch) == self.global_batch:
                yield batch


def accumulation(arguments: Arguments, data_ranks: int) -> int:
    """Return the micro-batches of one step, given or derived from the global batch; raises Unsupported when it is no
    multiple of what one forward pass of all ranks takes."""
    wanted, unit = arguments.global_batch_size, "samples"
    if arguments.global_batch_tokens > 0:
        wanted, unit = arguments.global_batch_tokens, "tokens"
    if wanted < 0:
        return arguments.gradient_accumulation_steps
    share = arguments.per_device_train_batch_size * data_ranks * (arguments.block_size if unit == "tokens" else 1)
    if wanted % share:
        near = max(share, round(wanted / share) * share)
        raise Unsupported(
            f"--global_batch_{'size' if unit == 'samples' else unit} {wanted:,} is not a multiple of the {share:,} {unit} "
            f"that {data_ranks} ranks take at once; {near:,} is the nearest"
        )
    return wanted // share


def loader(dataset: Dataset[Item], workers: int, pinned: bool, **options: Any) -> DataLoader[Item]:
    """Return a loader that draws nothing from the global random numbers, which dropout uses: a resumed run would
    otherwise begin its epoch with a draw that the unbroken one had made long before."""
    return DataLoader(
        dataset, num_workers=workers, pin_memory=pinned, generator=torch.Generator().manual_seed(0), **options
    )
