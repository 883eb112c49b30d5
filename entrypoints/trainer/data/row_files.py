"""Rows of jsonl, csv, parquet and json files and of hub datasets, each as a document with its line.

It imports no torch and no numpy: a plan reads the first rows too.
"""

from __future__ import annotations

import bisect
import csv
import hashlib
import io
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..columns import PAIR, Columns
from ..errors import Unsupported
from .json_rows import NotJson, json_rows

LINES = {".jsonl", ".ndjson"}
TABLES = {".csv", ".tsv"}
ENDINGS = LINES | TABLES | {".json", ".parquet"}
BATCH = 1024  # rows of parquet that are decoded at a time, fewer where they are long
DECODED = 1 << 22  # bytes of them
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """One text with the name that orders it, read when it is needed; `label` only in classification."""

    key: str
    read: Callable[[], str]
    label: str | None = None
    place: str = ""  # file and line of a row, for messages; "" for a whole file

    @property
    def where(self) -> str:
        """Where the text is, for messages: file:line, counted from 1, or the file."""
        return self.place or self.key


def numbered_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield a file's rows as they are read, with their line, of parquet and .json with their number from 1."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        yield from enumerate(parquet_rows(file), 1)
    elif suffix == ".json":
        yield from enumerate(json_rows(file), 1)
    else:
        yield from ((at, row) for at, _, row in _placed_rows(file))


def parquet_rows(file: Path, groups: Sequence[int] | None = None) -> Iterator[Any]:
    """Yield the rows of a parquet file, of all of its row groups or of some; few of them are decoded at a time."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, memory_map=True) as table:
        rows, size = (
            table.metadata.num_rows,
            sum(table.metadata.row_group(number).total_byte_size for number in range(table.num_row_groups)),
        )
        few = max(1, min(BATCH, DECODED * rows // max(size, 1)))
        for batch in table.iter_batches(few, row_groups=groups):
            yield from batch.to_pylist()


def line_of(file: str, at: int, row: Any, column: str) -> int:
    """Return the line to name for a row without a column: of a csv file whose header lacks it, the header's."""
    table = os.path.splitext(file)[1].lower() in TABLES
    return 1 if table and isinstance(row, Mapping) and column not in row else at


def document_of(number: int, at: int, row: Any, key: str, columns: Columns, shown: str) -> Document:
    """Return the document of a row, what is no text (a conversation) as JSON; raises Unsupported.

    `number` counts the rows from 0, `at` is the row's line, `shown` the file, for messages.
    """
    if columns.turns and isinstance(row, Mapping) and row.get(columns.text) is None and row.keys() >= PAIR:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        row = {columns.text: turns}
    for column in columns.together or filter(None, (columns.text, columns.label)):
        if not isinstance(row, Mapping) or row.get(column) is None:
            columns_there = ", ".join(map(str, row)) if isinstance(row, Mapping) else "no columns at all"
            option = "label_column" if column == columns.label else "text_column, messages_column"
            hint = "correct the data" if columns.together else f"set {option}, or correct the data"
            place = f"{shown}:{line_of(shown, at, row, column)}"
            raise Unsupported(f"{place}: the row has no {column!r}; it has: {columns_there} ({hint})")
    value = {name: row[name] for name in columns.together} if columns.together else row[columns.text]
    label = None if columns.label is None else str(row[columns.label])
    return Document(f"{key}#{number}", partial(_text, value), label, f"{shown}:{at}")


def row_of_line(file: str, at: int, line: str) -> Any:
    """Return the row of a line of jsonl; raises Unsupported."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise Unsupported(f"{file}:{at}: {NotJson(at, error)}") from None


def rows_of(file: Path, key: str, columns: Columns) -> Iterator[Document]:
    """Yield the documents of a file of rows, as they are read; raises Unsupported."""
    for number, (at, row) in enumerate(numbered_rows(file)):
        yield document_of(number, at, row, key, columns, os.fspath(file))


class Rows(Sequence[Document]):
    """The documents of many rows: all of them are checked once, and each is read again when it is needed.

    Only where a row stands, its line and its label are in memory.
    """

    def __init__(self, key: str, columns: Columns, shown: str) -> None:
        self.key, self.columns, self.shown = key, columns, shown
        self.lines, self.labels, self._numbers = array("q"), array("q"), dict[str, int]()
        self.names: list[str] = []  # each label once

    def add(self, at: int, row: Any) -> Document:
        """Check the next row, keep its line and label, and return it; raises Unsupported."""
        document = document_of(len(self.lines), at, row, self.key, self.columns, self.shown)
        self.lines.append(at)
        if (label := document.label) is not None:
            if label not in self._numbers:
                self._numbers[label] = len(self.names)
                self.names.append(label)
            self.labels.append(self._numbers[label])
        return document

    def row(self, number: int) -> Any:
        """Read a row."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: Any) -> Any:
        label = self.names[self.labels[number]] if self.names else None
        at = self.lines[number]
        return Document(f"{self.key}#{number}", partial(self._read, number, at), label, f"{self.shown}:{at}")

    def _read(self, number: int, at: int) -> str:
        return document_of(number, at, self.row(number), self.key, self.columns, self.shown).read()


class FileRows(Rows):
    """The rows of a jsonl or csv file, each by its place in the file."""

    def __init__(self, file: Path, key: str, columns: Columns) -> None:
        super().__init__(key, columns, os.fspath(file))
        self.file, self.places = file, array("q")
        for at, begin, row in _placed_rows(file):
            self.add(at, row)
            self.places.append(begin)
        self.places.append(file.stat().st_size)
        self.header = _header(file)

    def row(self, number: int) -> Any:
        """Read a row."""
        begin, end = self.places[number], self.places[number + 1]
        with open(self.file, "rb", buffering=0) as stream:
            stream.seek(begin)
            text = stream.read(end - begin).decode()
        if self.file.suffix.lower() not in TABLES:
            return row_of_line(self.shown, self.lines[number], text)
        return next(_reader(io.StringIO(text, newline=""), self.file, self.header), {})


class HubRows(Rows):
    """The rows of a hub dataset, which are memory-mapped."""

    def __init__(self, rows: Any, key: str, columns: Columns) -> None:
        super().__init__(key, columns, key)
        self.rows = rows
        for at, row in enumerate(rows, 1):
            self.add(at, row)

    def row(self, number: int) -> Any:
        """Read a row."""
        return self.rows[number]


class Documents(Sequence[Document]):
    """Documents in the order of their hashes. Rows of jsonl, csv and hub datasets stay where they are until they are read.

    Args:
        parts: the documents, as they were found.
        order: positions in all parts together; None: the order of the hashes.
    """

    def __init__(self, parts: Sequence[Sequence[Document]], order: Any = None) -> None:
        import numpy as np

        self.parts, self.ends = parts, list(accumulate(map(len, parts)))
        if order is None:
            hashes = bytearray()
            for part in parts:
                names = (
                    (f"{part.key}#{at}" for at in range(len(part)))
                    if isinstance(part, Rows)
                    else [each.key for each in part]
                )
                for name in names:
                    hashes += hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:16]
            halves = np.frombuffer(bytes(hashes), ">u8").reshape(-1, 2)
            order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal names stay in the order of `names`
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Documents(self.parts, self.order[index])
        number = int(self.order[index])
        part = bisect.bisect_right(self.ends, number)
        return self.parts[part][number - (self.ends[part - 1] if part else 0)]


def numbered_lines(stream: Iterable[str], begin: int = 0) -> Iterator[tuple[int, int, str]]:
    """Yield (line, first byte, text) of a stream of UTF-8 whose line ends are kept."""
    for at, line in enumerate(stream, 1):
        yield at, begin, line
        begin += len(line) if line.isascii() else len(line.encode())


def _placed_rows(file: Path) -> Iterator[tuple[int, int, Any]]:
    """Yield (line, first byte, row) of a jsonl or csv file."""
    with open(file, "rb") as raw:
        begin = len(_BOM) if raw.read(len(_BOM)) == _BOM else 0
    with open(file, encoding="utf-8-sig", newline="") as stream:
        lines = numbered_lines(stream, begin)
        if file.suffix.lower() not in TABLES:
            for at, place, line in lines:
                if line.strip():
                    try:
                        yield at, place, json.loads(line)
                    except json.JSONDecodeError as error:
                        raise NotJson(at, error) from None
            return
        at_end = [begin]

        def counted() -> Iterator[str]:
            for _, place, line in lines:
                at_end[0] = place + len(line.encode())
                yield line

        reader = _reader(counted(), file)
        reader.fieldnames  # noqa: B018, reads the header
        place = at_end[0]
        for row in reader:
            yield reader.line_num, place, row
            place = at_end[0]


def _reader(lines: Iterable[str], file: Path, header: Sequence[str] | None = None) -> csv.DictReader[str]:
    csv.field_size_limit(1 << 30)
    return csv.DictReader(lines, header, delimiter="\t" if file.suffix.lower() == ".tsv" else ",")


def _header(file: Path) -> Sequence[str] | None:
    """Return the names of a csv file's columns, None for other files."""
    if file.suffix.lower() not in TABLES:
        return None
    with open(file, encoding="utf-8-sig", newline="") as stream:
        return _reader(stream, file).fieldnames


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
