"""Load documents from files, folders, globs, job inputs, hub datasets, or the standard library's source.

A document is a whole file, or one row of a jsonl, csv or parquet file. Documents are put in the order of a hash of their
names, and the first of that order are held out: neither depends on the order in which a machine lists its files.
"""

from __future__ import annotations

import glob
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import Unsupported
from .parts import parts_of, shards_of
from .row_files import ENDINGS, Columns, Document, whole_text
from .row_table import NEVER, Documents, table_of
from .shared_reading import Part, SharedReader

STDLIB = "python-stdlib"
NO_DATASET = "there is no --dataset and the job has no input named train"
_NOT_CODE = {  # tests, what others installed, and tables that no person wrote
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "encodings", "pydoc_data",
}  # fmt: skip


def load(names: Sequence[str], columns: Columns, inputs: Mapping[str, str], folder: str = NEVER) -> Documents:
    """Return the documents that names stand for, in the order of their hashes; collective.

    Args:
        names: Files, folders, globs, hub datasets or inputs.
        columns: Where rows have their text.
        inputs: Folders of the job's inputs.
        folder: The token cache, in which rows are written to be mapped (row_table.py).

    Raises:
        Unsupported: There are no documents, or a row is wrong.
    """

    def read() -> Iterator[Document]:
        parts = (part for name in names for part in _parts(name, columns, inputs, lazily=False))
        return SharedReader().documents(parts, columns)

    found = Documents(table_of(read, folder))
    if not found:
        raise Unsupported(f"there is no text in {', '.join(names)}")
    return found


def located(name: str, inputs: Mapping[str, str]) -> str:
    """Return the path that input:NAME, or input:NAME/below, stands for, any other name as it is; raises Unsupported."""
    if not name.startswith("input:"):
        return name
    which, _, below = name.removeprefix("input:").partition("/")
    if which not in inputs:
        raise Unsupported(f"the job has no input {which!r}; it has: {', '.join(sorted(inputs)) or 'none'}")
    return os.path.join(inputs[which], below) if below else inputs[which]


def stream(
    names: Sequence[str],
    columns: Columns,
    inputs: Mapping[str, str],
    buffer: int = 0,
    seed: int = 0,
    reader: SharedReader | None = None,
) -> Iterator[Document]:
    """Yield the documents that names stand for, as they come; raises Unsupported.

    Args:
        names: Files, folders, globs, hub datasets or inputs.
        columns: Where rows have their text.
        inputs: Folders of the job's inputs.
        buffer: Documents to draw the next one from, kept in memory where they are rows. Below 2: the order of the files.
        seed: Of the drawing. The same buffer and seed give the same order on every rank and after a restart.
        reader: Hands rows from rank to rank; the iterator is collective then. None: this process reads all of them.
    """
    reader = reader or SharedReader()
    found = reader.documents((part for name in names for part in _parts(name, columns, inputs, lazily=True)), columns)
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
    documents: Sequence[Document], percentage: float, whole: bool = False
) -> tuple[Sequence[Document], Sequence[Document]]:
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


def bounded(documents: Iterable[Document], max_bytes: int = -1) -> Iterator[Document]:
    """Yield the documents, at most that many bytes of UTF-8 in all; the last one is cut at a character."""
    left = max_bytes
    for document in documents:
        if max_bytes >= 0:
            if left <= 0:
                return
            raw = document.read().encode("utf-8", "surrogatepass")
            if len(raw) > left:
                document = replace(document, read=raw[:left].decode("utf-8", "ignore").__str__)
            left -= len(raw)
        yield document


def take(documents: Iterable[Document], max_bytes: int = -1) -> Iterator[str]:
    """Yield the texts that are not empty, at most that many bytes of UTF-8 in all."""
    return (text for document in bounded(documents, max_bytes) if (text := document.read()))


def _parts(name: str, columns: Columns, inputs: Mapping[str, str], lazily: bool) -> Iterator[Part]:
    """Yield the parts of what a name stands for, and text files as documents."""
    files = _files_of(name, inputs)
    if files is None:
        yield from shards_of(*_hub(name, columns, lazily))
        return
    for file, key, in_folder in files:
        if file.suffix.lower() in ENDINGS:
            yield from parts_of(file, key)
        elif whole := _whole(file, key, columns, in_folder):
            yield whole


def _files_of(name: str, inputs: Mapping[str, str]) -> Iterator[tuple[Path, str, bool]] | None:
    """Return (file, key, whether it was only found in a folder) of all files of a name; None for a hub dataset."""
    if name == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        found = ((file, file.relative_to(folder)) for file in files_below(folder))
        return (
            (file, relative.as_posix(), True)
            for file, relative in found
            if file.suffix == ".py" and not _NOT_CODE.intersection(relative.parts)
        )
    path = located(name, inputs)
    if os.path.isdir(path):
        return ((file, _relative(file, path), True) for file in files_below(Path(path)))
    if os.path.isfile(path):
        return iter([(Path(path), os.path.basename(path), False)])
    if matches := sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match)):
        above = os.path.commonpath([os.path.dirname(match) or "." for match in matches])
        return ((Path(match), _relative(match, above), False) for match in matches)
    if path == name and not glob.has_magic(name) and like_hub_name(name):
        return None
    raise Unsupported(f"the dataset {name} does not exist below {os.getcwd()}")


def _relative(file: str | Path, folder: str) -> str:
    return Path(os.path.relpath(file, folder)).as_posix()


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those below it, hidden ones left out."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in ("__pycache__", "site-packages")
        )
        yield from (Path(root, name) for name in sorted(files) if not name.startswith("."))


def _whole(file: Path, key: str, columns: Columns, in_folder: bool) -> Document | None:
    """Return a text file as one document; None for one that was only found in a folder and holds no text."""
    if columns.label is not None:
        if in_folder:
            return None
        raise Unsupported(f"{file} has no labels: classification reads jsonl, csv, parquet or a hub dataset")
    with open(file, "rb") as stream:
        binary = b"\0" in stream.read(8192)
    if binary and not in_folder:
        raise Unsupported(f"{file} is not text")
    return None if binary else Document(key, partial(whole_text, str(file)), file=str(file))


def like_hub_name(name: str) -> bool:
    """Return whether a name can be one of the hub: at most one slash, and no ending of a text file."""
    parts = name.split("/")
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~")) and Path(name).suffix.lower() not in (
        ENDINGS | {".txt", ".py", ".md"}
    )  # fmt: skip


def _hub(name: str, columns: Columns, lazily: bool) -> tuple[Any, str]:
    """Return the rows of a hub dataset, and the name of its split."""
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
    return rows, f"{name}:{columns.split}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
