"""Rows of jsonl, csv, parquet and json files and of hub datasets, each as a document with its line.

It imports no torch and no numpy: a plan reads the first rows too.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Document:
    """One text with the name that orders it, read when it is needed; `label` only in classification."""

    key: str
    read: Callable[[], str]
    label: str | None = None
    place: str = ""  # file and line of a row, for messages; "" for a whole file
    file: str = ""  # a whole file

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
        yield from _rows_of_lines(file)


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


def whole_text(file: str) -> str:
    """Return the text of a file."""
    return Path(file).read_bytes().decode("utf-8", "replace")


def _rows_of_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line, row) of a jsonl or csv file."""
    with open(file, encoding="utf-8-sig", newline="") as stream:
        if file.suffix.lower() in TABLES:
            csv.field_size_limit(1 << 30)
            reader = csv.DictReader(stream, delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
            yield from ((reader.line_num, row) for row in reader)
            return
        for at, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield at, json.loads(line)
                except json.JSONDecodeError as error:
                    raise NotJson(at, error) from None


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
