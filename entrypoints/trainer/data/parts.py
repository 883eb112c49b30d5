"""Parts of a stream, each read by one rank: byte ranges of jsonl, row groups of parquet, other files, shards of the hub."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import Unsupported
from .json_rows import NotJson
from .row_files import LINES, numbered_rows, parquet_rows

RANGE = 1 << 20  # bytes of jsonl that a rank reads at a time

Row = tuple[int, Any]  # its line or number, counted from 1; a row, or a `Line` that has one


class Line(str):
    """A line of jsonl that is not parsed yet; it may be empty."""


@dataclass(frozen=True)
class Shard:
    """Rows that are read one after another.

    Args:
        key: Of the source.
        shown: The source, for messages.
        rows: The rows with their lines.
        first: Whether the source begins with it.
        relative: Whether lines are counted from the beginning of the shard, and not of the source.
    """

    key: str
    shown: str
    rows: Callable[[], Iterator[Row]]
    first: bool = True
    relative: bool = False


def parts_of(file: Path, key: str) -> Iterator[Shard]:
    """Yield the parts of a file of rows, in the order of the rows."""
    shown = os.fspath(file)
    if file.suffix.lower() in LINES:
        for begin in range(0, file.stat().st_size, RANGE):
            rows = partial(_checked, file, partial(read_range, file, begin))
            yield Shard(key, shown, rows, begin == 0, relative=True)
    elif file.suffix.lower() == ".parquet":
        with readable(file):
            counts = _row_groups(file)
        for number, before in enumerate(accumulate(counts[:-1], initial=0)):
            yield Shard(key, shown, partial(_checked, file, partial(row_group, file, number, before)), number == 0)
    else:
        yield Shard(key, shown, partial(_checked, file, partial(numbered_rows, file)))


def shards_of(rows: Any, key: str) -> Iterator[Shard]:
    """Yield the shards of a hub dataset, one where it is not streamed."""
    total = getattr(rows, "num_shards", 1)
    for index in range(total):
        shard = partial(rows.shard, num_shards=total, index=index) if total > 1 else rows.__iter__
        yield Shard(key, key, partial(_counted, shard), index == 0, relative=True)


def row_group(file: Path, number: int, before: int) -> Iterator[Row]:
    """Yield the rows of one row group of a parquet file, which follow so many others."""
    yield from enumerate(parquet_rows(file, [number]), before + 1)


def read_range(file: Path, begin: int) -> Iterator[Row]:
    """Yield (number from 1, line) of the lines that begin in a byte range of a file."""
    end = begin + RANGE
    with open(file, "rb") as stream:
        if begin:  # a line belongs to the range in which it begins
            stream.seek(begin - 1)
            stream.readline()
        first = stream.tell()
        raw = stream.read(end - first) if first < end else b""
        if raw and not raw.endswith(b"\n"):
            raw += stream.readline()
    yield from enumerate(map(Line, io.StringIO(raw.decode("utf-8-sig" if begin == 0 else "utf-8"), newline=None)), 1)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise Unsupported, with the line where it is known, for a file that cannot be read."""
    try:
        yield
    except NotJson as error:
        raise Unsupported(f"{file}:{error.line}: {error}") from None
    except (ValueError, csv.Error) as error:
        raise Unsupported(f"{file} cannot be read: {error}") from None


def _checked(file: Path, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    with readable(file):
        yield from rows()


def _counted(shard: Callable[[], Iterable[Any]]) -> Iterator[Row]:
    yield from enumerate(shard(), 1)


def _row_groups(file: Path) -> list[int]:
    """Return the rows of each row group."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        return [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]
