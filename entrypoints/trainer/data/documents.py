"""Load documents from files, folders, globs, job inputs, hub datasets, or the standard library's source.

A document is a whole file, or one row of a jsonl, csv or parquet file. Documents are put in the order of a hash of their
names, and the first of that order are held out: neither depends on the order in which a machine lists its files.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import Unsupported

STDLIB = "python-stdlib"
NO_DATASET = "there is no --dataset and the job has no input named train"
_NOT_CODE = {  # tests, what others installed, and tables that no person wrote
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "encodings", "pydoc_data",
}  # fmt: skip
_PAIR = {"prompt", "completion"}
_ROWS = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}


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

    @property
    def order(self) -> str:
        """Where this document stands among others: by a hash of its name."""
        return hashlib.sha256(self.key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Columns:
    """Where rows have their text and, in classification, their label; and how a hub dataset is asked for."""

    text: str = "text"
    label: str | None = None
    turns: bool = False  # conversations: prompt and completion are one too, where the text is not there
    config: str = ""
    split: str = "train"
    together: tuple[str, ...] = ()  # columns that make one document, as JSON: prompt, chosen and rejected


def load(names: Sequence[str], columns: Columns, inputs: Mapping[str, str]) -> list[Document]:
    """Return the documents that names stand for, in the order of their hashes; raises Unsupported when there are none."""
    documents: list[Document] = []
    for name in names:
        documents += _named(name, columns, inputs)
    if not documents:
        raise Unsupported(f"there is no text in {', '.join(names)}")
    # Several names may hold files of the same relative path: the text decides then.
    return sorted(documents, key=lambda document: document.order)


def located(name: str, inputs: Mapping[str, str]) -> str:
    """Return the path that input:NAME, or input:NAME/below, stands for, any other name as it is; raises Unsupported."""
    if not name.startswith("input:"):
        return name
    which, _, below = name.removeprefix("input:").partition("/")
    if which not in inputs:
        raise Unsupported(f"the job has no input {which!r}; it has: {', '.join(sorted(inputs)) or 'none'}")
    return os.path.join(inputs[which], below) if below else inputs[which]


def stream(
    names: Sequence[str], columns: Columns, inputs: Mapping[str, str], buffer: int = 0, seed: int = 0
) -> Iterator[Document]:
    """Yield the documents that names stand for, as they come; raises Unsupported.

    Args:
        names: Files, folders, globs, hub datasets or inputs.
        columns: Where rows have their text.
        inputs: Folders of the job's inputs.
        buffer: Documents to draw the next one from, kept in memory where they are rows. Below 2: the order of the files.
        seed: Of the drawing. The same buffer and seed give the same order on every rank and after a restart.
    """
    found = (document for name in names for document in _named(name, columns, inputs, lazily=True))
    return shuffle(found, buffer, seed) if buffer > 1 else found


def shuffle(items: Iterable[Document], buffer: int, seed: int) -> Iterator[Document]:
    """Yield each item once, drawn from a buffer of so many that come next."""
    draw, held = random.Random(seed), list[Document]()
    for item in items:
        if len(held) < buffer:
            held.append(item)
            continue
        place = draw.randrange(buffer)
        yield held[place]
        held[place] = item
    draw.shuffle(held)
    yield from held


def hold_out(
    documents: list[Document], percentage: float, whole: bool = False
) -> tuple[list[Document], list[Document]]:
    """Return (training, held out); the only document of all is cut at the end of a line, unless it is to stay whole."""
    if percentage == 0 or (whole and len(documents) == 1):
        return documents, []
    if len(documents) == 1 and documents[0].label is None:
        text = documents[0].read()
        at = text.rfind("\n", 0, int(len(text) * (1 - percentage / 100))) + 1
        if not 0 < at < len(text):
            return documents, []
        first, last = text[:at], text[at:]
        return [Document(documents[0].key, lambda: first)], [Document(documents[0].key + "#end", lambda: last)]
    count = min(len(documents) - 1, max(1, round(len(documents) * percentage / 100)))
    return documents[count:], documents[:count]


def take(documents: Iterable[Document], max_bytes: int = -1) -> Iterator[str]:
    """Yield the texts, at most that many bytes of UTF-8 in all; the last one is cut at a character."""
    left = max_bytes
    for document in documents:
        text = document.read()
        if max_bytes >= 0:
            raw = text.encode("utf-8", "surrogatepass")
            if len(raw) > left:
                text = raw[:left].decode("utf-8", "ignore")
            left -= len(raw)
        if text:
            yield text
        if max_bytes >= 0 and left <= 0:
            return


def _named(name: str, columns: Columns, inputs: Mapping[str, str], lazily: bool = False) -> Iterator[Document]:
    if name == STDLIB:
        yield from _standard_library()
        return
    path = located(name, inputs)
    if os.path.isdir(path):
        for file in _files_below(Path(path)):
            yield from _of_file(file, Path(path), columns, in_folder=True, lazily=lazily)
    elif os.path.isfile(path):
        yield from _of_file(Path(path), Path(path).parent, columns, lazily=lazily)
    elif matches := sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match)):
        above = Path(os.path.commonpath([os.path.dirname(match) or "." for match in matches]))
        for match in matches:
            yield from _of_file(Path(match), above, columns, lazily=lazily)
    elif path == name and not glob.has_magic(name) and like_hub_name(name):
        yield from _of_hub(name, columns, lazily)
    else:
        raise Unsupported(f"the dataset {name} does not exist below {os.getcwd()}")


def _standard_library() -> Iterator[Document]:
    folder = Path(sysconfig.get_path("stdlib"))
    for file in _files_below(folder):
        relative = file.relative_to(folder)
        if file.suffix == ".py" and not _NOT_CODE.intersection(relative.parts):
            yield Document(relative.as_posix(), _reader(file))


def _files_below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in ("__pycache__", "site-packages")
        )
        yield from (Path(root, name) for name in sorted(files) if not name.startswith("."))


def _reader(file: Path) -> Callable[[], str]:
    return lambda: file.read_bytes().decode("utf-8", "replace")


def _holder(text: str) -> Callable[[], str]:
    return lambda: text


def _of_file(
    file: Path, above: Path, columns: Columns, in_folder: bool = False, lazily: bool = False
) -> Iterator[Document]:
    """Yield a file's documents; one that was only found in a folder is left out when it holds no text."""
    key = Path(os.path.relpath(file, above)).as_posix()
    if lazily and file.suffix.lower() in (".jsonl", ".ndjson"):
        with open(file, encoding="utf-8-sig") as stream:
            lines = ((at, line) for at, line in enumerate(stream, 1) if line.strip())
            for number, (at, line) in enumerate(lines):
                read = partial(_text_of_line, file, key, columns, at, line)
                yield Document(f"{key}#{number}", read, place=f"{file}:{at}")
        return
    if file.suffix.lower() in _ROWS:
        try:
            yield from _documents(_rows(file), key, columns, os.fspath(file))
        except (ValueError, UnicodeDecodeError, csv.Error) as error:
            raise Unsupported(f"{file} cannot be read: {error}") from None
        return
    if columns.label is not None:
        if in_folder:
            return
        raise Unsupported(f"{file} has no labels: classification reads jsonl, csv, parquet or a hub dataset")
    with open(file, "rb") as stream:
        binary = b"\0" in stream.read(8192)
    if binary and not in_folder:
        raise Unsupported(f"{file} is not text")
    if not binary:
        yield Document(key, _reader(file))


def _text_of_line(file: Path, key: str, columns: Columns, at: int, line: str) -> str:
    """Return the text of one row of jsonl; raises Unsupported."""
    [document] = _documents([(at, _row_of_line(file, at, line))], key, columns, os.fspath(file))
    return document.read()


def _row_of_line(file: Path, at: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise Unsupported(f"{file}:{at}: is not JSON: {error.msg} at column {error.colno}") from None


def _rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield a file's rows as they are read, with their line, of parquet and .json with their number from 1.

    A .json file alone is read whole.
    """
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as table:
            first = 1
            for batch in table.iter_batches():
                yield from enumerate(batch.to_pylist(), first)
                first += batch.num_rows
    elif suffix in (".csv", ".tsv"):
        with open(file, encoding="utf-8-sig", newline="") as stream:
            csv.field_size_limit(1 << 30)
            reader = csv.DictReader(stream, delimiter="\t" if suffix == ".tsv" else ",")
            for row in reader:
                yield reader.line_num, row
    else:
        with open(file, encoding="utf-8-sig") as stream:
            if suffix == ".json":
                whole = json.load(stream)
                yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
            else:
                for at, line in enumerate(stream, 1):
                    if line.strip():
                        yield at, _row_of_line(file, at, line)


def _documents(
    rows: Iterable[tuple[int, Mapping[str, Any]]], key: str, columns: Columns, shown: str
) -> Iterator[Document]:
    """Yield a document for each row, what is no text (a conversation) as JSON; raises Unsupported.

    Each row comes with its line; `shown` is the file, for messages.
    """
    for number, (at, row) in enumerate(rows):
        place = f"{shown}:{at}"
        if columns.turns and isinstance(row, Mapping) and row.get(columns.text) is None and row.keys() >= _PAIR:
            turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
            row = {columns.text: turns}
        for column in columns.together or filter(None, (columns.text, columns.label)):
            if not isinstance(row, Mapping) or row.get(column) is None:
                columns_there = ", ".join(map(str, row)) if isinstance(row, Mapping) else "no columns at all"
                option = "label_column" if column == columns.label else "text_column, messages_column"
                hint = "correct the data" if columns.together else f"set {option}, or correct the data"
                raise Unsupported(f"{place}: the row has no {column!r}; it has: {columns_there} ({hint})")
        text = {name: row[name] for name in columns.together} if columns.together else row[columns.text]
        if isinstance(text, list | dict):
            text = json.dumps(text, ensure_ascii=False)
        label = None if columns.label is None else str(row[columns.label])
        yield Document(f"{key}#{number}", _holder(str(text)), label, place)


def like_hub_name(name: str) -> bool:
    """Return whether a name can be one of the hub: at most one slash, and no ending of a text file."""
    parts = name.split("/")
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~")) and Path(name).suffix.lower() not in (
        _ROWS | {".txt", ".py", ".md"}
    )  # fmt: skip


def _of_hub(name: str, columns: Columns, lazily: bool) -> Iterator[Document]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise Unsupported(f"the hub dataset {name} needs the package datasets (pip install datasets)") from None
    try:
        rows = load_dataset(name, columns.config or None, split=columns.split, streaming=lazily)
    except Exception as error:  # the library raises errors of many kinds: no such name, no network, no such split
        raise Unsupported(
            f"{name} is not a file here, and the hub dataset cannot be loaded: {_first_line(error)}"
        ) from None
    key = f"{name}:{columns.split}"
    yield from _documents(enumerate(rows, 1), key, columns, key)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
