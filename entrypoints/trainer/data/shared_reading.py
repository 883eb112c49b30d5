"""Read the rows of a stream: each row by one rank, which hands it to the others.

In a round each rank reads a part of its own (parts.py), all at the same time: of other kinds than jsonl at most AHEAD
characters of it. The rank of a longer part reads on when its turn comes, and the others wait. The order of rows is that of
the files on any number of ranks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from typing import Any

from .. import collectives
from .parts import Range, Row, Shard
from .row_files import Columns, Document, document_of, row_of_line

BATCH = 1024  # rows that are handed over at a time
AHEAD = 1 << 25  # characters of a part that a rank reads before its turn

Texts = list[tuple[int, str]]  # (line, text)
Part = Range | Shard | Document  # a document that is at hand is read by the rank that tokenizes it


class SharedReader:
    """The rows of a stream, handed from rank to rank; its iterators are collective if `together`.

    Args:
        together: all ranks read the same, each at the same time as the others. Without it this process reads all.
        group: of torch.distributed, for CPU tensors; None: all ranks.
    """

    def __init__(self, together: bool = False, group: Any = None) -> None:
        self.ranks = collectives.world_size() if together else 1
        self.rank = collectives.rank() if self.ranks > 1 else 0
        self.group, self._turn = group, 0

    def documents(self, parts: Iterable[Part], columns: Columns) -> Iterator[Document]:
        """Yield the document of each row of some parts, in their order."""
        for kind, some in groupby(parts, type):
            if kind is Range:
                yield from self._of_ranges(some, columns)  # type: ignore[arg-type]
            elif kind is Shard:
                yield from self._of_shards(some, columns)  # type: ignore[arg-type]
            else:
                yield from some  # type: ignore[misc]

    def _of_ranges(self, parts: Iterator[Range], columns: Columns) -> Iterator[Document]:
        """Yield the documents of jsonl: a line is parsed by the rank that tokenizes it."""
        before = number = 0
        while some := list(islice(parts, self.ranks)):
            reads = [part.read for part in some]
            found = collectives.share(reads, self.group) if self.ranks > 1 else [read() for read in reads]
            for part, (lines, rows) in zip(some, found, strict=True):
                before, number = (0, 0) if part.begin == 0 else (before, number)
                shown = os.fspath(part.file)
                for at, line in rows:
                    read = partial(_text_of_line, before + at, line, part.key, columns, shown)
                    yield Document(f"{part.key}#{number}", read, place=f"{shown}:{before + at}")
                    number += 1
                before += lines

    def _of_shards(self, parts: Iterator[Shard], columns: Columns) -> Iterator[Document]:
        before = number = 0
        while some := list(islice(parts, self.ranks)):
            first, self._turn = self._turn, self._turn + len(some)
            mine = (self.rank - first) % self.ranks
            reading = _Reading(some[mine], columns) if mine < len(some) else None
            if reading and len(some) > 1:
                reading.read_ahead()
            for index, part in enumerate(some):
                before, number = (0, 0) if part.first else (before, number)
                base = before if part.relative else 0
                while batch := self._handed((first + index) % self.ranks, reading, base):
                    for before, text in batch:
                        yield Document(f"{part.key}#{number}", text.__str__, place=f"{part.shown}:{before}")
                        number += 1

    def _handed(self, owner: int, reading: _Reading | None, base: int) -> Texts:
        """Return the next texts of the part that the owner reads."""
        make: Callable[[], Texts] = partial(reading.batch, base) if reading else list
        return collectives.from_rank(owner, make, self.group) if self.ranks > 1 else make()


class _Reading:
    """One shard, as its rank reads it."""

    def __init__(self, part: Shard, columns: Columns) -> None:
        self.part, self.columns, self.rows = part, columns, part.rows()
        self.ready, self.rest = deque[Texts](), list[Row]()
        self.error: Exception | None = None

    def batch(self, base: int) -> Texts:
        """Return the next texts, none at the end; lines are counted from `base` on."""
        if self.ready:
            return [(base + at, text) for at, text in self.ready.popleft()]
        if self.error:
            raise self.error
        rows, self.rest = self.rest or list(islice(self.rows, BATCH)), []
        return self._texts(rows, base)

    def read_ahead(self) -> None:
        """Read the first rows; an error is raised by `batch`, behind what comes before it."""
        size = 0
        while size < AHEAD:
            try:
                self.rest = list(islice(self.rows, BATCH))
            except Exception as error:
                self.error = error
                return
            try:
                texts = self._texts(self.rest, 0)
            except Exception:  # by `batch`, which knows the line
                return
            if not texts:
                return
            self.ready.append(texts)
            self.rest = []
            size += sum(len(text) for _, text in texts)

    def _texts(self, rows: list[Row], base: int) -> Texts:
        shown, key = self.part.shown, self.part.key
        return [(base + at, document_of(0, base + at, row, key, self.columns, shown).read()) for at, row in rows]


def _text_of_line(at: int, line: str, key: str, columns: Columns, shown: str) -> str:
    """Return the text of one row of jsonl; raises Unsupported."""
    return document_of(0, at, row_of_line(shown, at, line), key, columns, shown).read()
