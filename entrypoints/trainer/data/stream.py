"""Streaming data: texts are read as they come and packed into blocks.

The ranks read and tokenize documents in turns and hand each other the tokens; each takes its own blocks of a global batch.
The order is the same on any world, and the place in it is two numbers, the document and the token in it at which the next
block begins. A resumed run passes over the documents before, which are not tokenized again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from .. import collectives
from ..errors import Unsupported
from .samples import EMPTY, Blocks, Item

if TYPE_CHECKING:
    from .documents import Document

MOST = 4096  # documents that the ranks tokenize before they hand each other the tokens

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class Texts:
    """The documents of an epoch, `texts(epoch)`, and the tokenizer that makes blocks of them."""

    def __init__(self, texts: Callable[[int], Iterator[Document]], tokenizer: Any, block_size: int) -> None:
        self.texts, self.tokenizer, self.block_size = texts, tokenizer, block_size

    def __getitem__(self, index: int) -> Item:
        """Return a block of no meaning."""
        return Blocks(np.full(self.block_size, self.tokenizer.eos_token_id, np.int32), self.block_size)[EMPTY]

    def tokens(self, document: Document) -> Tokens:
        """Return the tokens of a document, end of text included."""
        ids = self.tokenizer(document.read(), add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return np.asarray([*ids, self.tokenizer.eos_token_id], np.int32)


class StreamBatches:
    """One rank's micro-batches of a stream: what GlobalBatches is to data that is at hand, and its loader too."""

    steps_per_epoch = math.inf
    collate = staticmethod(default_collate)

    def __init__(
        self, texts: Texts, per_device: int, accumulation: int, world: int, rank: int, full: bool = False
    ) -> None:
        self.texts, self.per_device, self.world, self.rank, self.full = texts, per_device, world, rank, full
        self.global_batch = per_device * accumulation * world
        self._group = collectives.cpu_group() if collectives.world_size() > 1 else None
        self._known = [0, 0]  # documents that were tokenized, and their tokens
        self.go_to({"epoch": 0, "samples": 0, "document": 0, "offset": 0})

    @property
    def passed(self) -> float:
        """Passes over the data that are done; how far the current one is cannot be known."""
        return self.epoch

    def place(self) -> dict[str, int]:
        """Return the place in the data that a checkpoint keeps."""
        return {"epoch": self.epoch, "samples": self.samples, "document": self._at[0], "offset": self._at[1]}

    def go_to(self, position: Mapping[str, int]) -> None:
        """Continue from a position in the data."""
        self.epoch, self.samples = position["epoch"], position["samples"]
        self._at = self._read_to = (position["document"], position["offset"])
        self._held: deque[Tokens] = deque()  # documents that are begun; of the first, the offset is gone
        self._ahead = -position["offset"]  # tokens that are held and not read
        self._source = islice(self.texts.texts(self.epoch), position["document"], None)
        self.exhausted = False

    def next_epoch(self) -> None:
        """Go to the beginning of the stream; raises Unsupported when there was nothing in it."""
        if self.samples == 0:
            raise Unsupported(
                "there is nothing to train on: the streamed training data has no rows. Check dataset and its files"
            )
        self.go_to({"epoch": self.epoch + 1, "samples": 0, "document": 0, "offset": 0})

    def windows(self) -> Iterator[int]:
        """Yield how many micro-batches the next step takes, as long as the stream lasts."""
        while len(batch := self._next()):
            self._batch = batch
            yield math.ceil(len(batch) / (self.per_device * self.world))
        self.exhausted = True

    def _next(self) -> Any:
        """Return the samples of the next global batch, fewer only at the end of the stream."""
        size = self.texts.block_size
        return Blocks(self._read(self.global_batch * size), size)

    def advance(self) -> None:
        """Count the samples of one step as taken."""
        self.samples += len(self._batch)
        self._at = self._read_to

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        share = self.per_device * self.world
        while True:
            blocks = self._batch
            for at in range(0, len(blocks), share):
                mine = list(range(at, min(at + share, len(blocks))))
                mine = mine[self.rank * self.per_device : (self.rank + 1) * self.per_device]
                mine += [EMPTY] * (self.per_device - len(mine) if self.full or not mine else 0)
                yield self.collate([blocks[index] for index in mine])

    def _read(self, count: int) -> Tokens:
        """Return the next tokens, fewer only at the end of the stream."""
        while self._ahead < count and (documents := list(islice(self._source, self._documents(count - self._ahead)))):
            work = [partial(self.texts.tokens, document) for document in documents]
            for tokens in collectives.share(work, self._group):
                self._held.append(tokens)
                self._ahead += len(tokens)
                self._known = [self._known[0] + 1, self._known[1] + len(tokens)]
        if self._ahead <= 0:
            return np.zeros(0, np.int32)
        document, offset = self._read_to
        taken = np.concatenate(self._held)[offset : offset + count]
        offset += len(taken)
        self._ahead -= len(taken)
        while self._held and offset >= len(self._held[0]):
            offset -= len(self._held.popleft())
            document += 1
        self._read_to = (document, offset)
        return taken

    def _documents(self, tokens: int) -> int:
        """Return how many documents to read at once for so many tokens; at least one for each rank."""
        documents, known = self._known
        expected = tokens * documents // known if known else 0
        return min(max(expected, collectives.world_size()), MOST)
