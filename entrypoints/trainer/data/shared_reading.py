"""Read the rows of a stream: each row by one rank, which hands it to the others.

A jsonl file is read in byte ranges, one for each rank at a time. Row groups of parquet, other files and the shards of a
hub dataset are each read by one rank, in turns. The order of rows is that of the files on any number of ranks.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from .. import collectives
from .row_files import LINES, Columns, document_of, numbered_rows, row_of_line

RANGE = 1 << 20  # bytes of jsonl that a rank reads at a time
BATCH = 1024  # rows of other kinds

Batch = tuple[int, list[tuple[int, str]]]  # by how much later rows are further on; (line from there on, text)


class SharedReader:
    """The rows of files, handed from rank to rank; its iterators are collective unless `together` is off.

    Args:
        together: all ranks read the same, each at the same time as the others.
        group: of torch.distributed, for CPU tensors; None: all ranks.
    """

    def __init__(self, together: bool = False, group: Any = None) -> None:
        self.ranks = collectives.world_size() if together else 1
        self.group, self.turns = group, count()

    def texts(self, file: Path, key: str, columns: Columns) -> Iterator[tuple[int, Callable[[], str]]]:
        """Yield (line, its text when it is called) of each row of a file; a line of jsonl is parsed by the caller."""
        shown = os.fspath(file)
        if file.suffix.lower() in LINES:
            ranges = (partial(read_range, file, begin) for begin in range(0, file.stat().st_size, RANGE))
            for at, line in self._ranges(ranges):
                yield at, partial(_text_of_line, at, line, key, columns, shown)
        elif file.suffix.lower() == ".parquet":
            yield from self.shards(
                [partial(_row_group, file, number) for number in range(_groups(file))], key, columns, shown
            )
        else:
            yield from self.shards([partial(numbered_rows, file)], key, columns, shown, numbered=True)

    def shards(
        self,
        shards: Iterable[Callable[[], Iterable[Any]]],
        key: str,
        columns: Columns,
        shown: str,
        numbered: bool = False,
    ) -> Iterator[tuple[int, Callable[[], str]]]:
        """Yield (line, its text) of each row of some shards, each of which one rank reads, in batches.

        `numbered`: a shard gives its rows with their lines; without it they are counted from 1.
        """
        before = 0
        for shard in shards:
            owner = next(self.turns) % self.ranks
            rows = iter(_numbered(shard, numbered)) if owner == self._rank else iter(())
            while batch := self._from(owner, partial(_texts, rows, before, key, columns, shown)):
                yield from ((at, text.__str__) for at, text in batch)
                before = batch[-1][0]

    @property
    def _rank(self) -> int:
        return collectives.rank() if self.ranks > 1 else 0

    def _ranges(self, ranges: Iterator[Callable[[], Batch]]) -> Iterator[tuple[int, str]]:
        before = 0
        while some := list(islice(ranges, self.ranks)):
            found = collectives.share(some, self.group) if self.ranks > 1 else [read() for read in some]
            for lines, rows in found:
                yield from ((before + at, line) for at, line in rows)
                before += lines

    def _from(self, owner: int, make: Callable[[], list[tuple[int, str]]]) -> list[tuple[int, str]]:
        return collectives.from_rank(owner, make, self.group) if self.ranks > 1 else make()


def read_range(file: Path, begin: int) -> Batch:
    """Return how many lines begin in a byte range of a file, and (number from 1, line) of those that are not empty."""
    end = begin + RANGE
    with open(file, "rb") as stream:
        if begin:  # a line belongs to the range in which it begins
            stream.seek(begin - 1)
            stream.readline()
        first = stream.tell()
        raw = stream.read(end - first) if first < end else b""
        if raw and not raw.endswith(b"\n"):
            raw += stream.readline()
    lines = list(io.StringIO(raw.decode("utf-8-sig" if begin == 0 else "utf-8"), newline=None))
    return len(lines), [(at, line) for at, line in enumerate(lines, 1) if line.strip()]


def _text_of_line(at: int, line: str, key: str, columns: Columns, shown: str) -> str:
    """Return the text of one row of jsonl; raises Unsupported."""
    return document_of(0, at, row_of_line(shown, at, line), key, columns, shown).read()


def _texts(
    rows: Iterator[tuple[int, Any]], before: int, key: str, columns: Columns, shown: str
) -> list[tuple[int, str]]:
    """Return the next rows as (line, text); rows without a line follow `before`."""
    some = islice(rows, BATCH)
    lines = ((at or before + number, row) for number, (at, row) in enumerate(some, 1))
    return [(at, document_of(0, at, row, key, columns, shown).read()) for at, row in lines]


def _numbered(shard: Callable[[], Iterable[Any]], numbered: bool) -> Iterator[tuple[int, Any]]:
    yield from shard() if numbered else ((0, row) for row in shard())


def _groups(file: Path) -> int:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        return int(table.num_row_groups)


def _row_group(file: Path, number: int) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(BATCH, row_groups=[number]):
            yield from batch.to_pylist()
