"""Read the rows of a stream: each row by one rank, which hands it to the others.

In a round each rank reads a part of its own (parts.py), all at the same time, at most AHEAD characters of it. The rank of
a longer part reads on when its turn comes, and the others wait. The order of rows is that of the files on any number of
ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from typing import Any

from .. import collectives
from .parts import Line, Row, Shard
from .row_files import Columns, Document, document_of, row_of_line

BATCH = 1024  # rows that are handed over at a time
AHEAD = 1 << 25  # characters of a part that a rank reads before its turn

Texts = list[tuple[int, str | None, str | None]]  # (line, text, label); no text in an empty line
Part = Shard | Document  # a document that is at hand is read by the rank that tokenizes it


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
            if kind is Shard:
                yield from self._of_shards(some, columns)  # type: ignore[arg-type]
            else:
                yield from some  # type: ignore[misc]

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
                    for before, text, label in batch:
                        if text is not None:
                            yield Document(f"{part.key}#{number}", text.__str__, label, f"{part.shown}:{before}")
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
            return [(base + at, text, label) for at, text, label in self.ready.popleft()]
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
            size += sum(len(text or "") for _, text, _ in texts)

    def _texts(self, rows: list[Row], base: int) -> Texts:
        return [self._text(base + at, row) for at, row in rows]

    def _text(self, at: int, row: Any) -> tuple[int, str | None, str | None]:
        shown = self.part.shown
        if isinstance(row, Line):
            if not row.strip():
                return at, None, None
            row = row_of_line(shown, at, row)
        document = document_of(0, at, row, self.part.key, self.columns, shown)
        return at, document.read(), document.label
