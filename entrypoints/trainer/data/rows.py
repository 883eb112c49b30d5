"""Check the first rows of data files before anything is submitted, by what the task expects of a row.

It imports no torch. The training itself uses the same predicates.
"""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .documents import STDLIB, files_below
from .json_rows import NotJson
from .row_files import ENDINGS, line_of, numbered_rows

if TYPE_CHECKING:
    from ..arguments import Arguments

FIRST = 20  # rows of a file
MOST_FILES = 50  # of a folder


def problems(arguments: Arguments, inputs: Mapping[str, str], source: Path | None) -> Iterator[str]:
    """Yield a sentence for the first wrong row of each data file that this machine has.

    Args:
        arguments: the trainer's.
        inputs: each input's path on this machine, "" where only the node has it.
        source: the job's source, to which names are relative.
    """
    for option, default in (("dataset", "input:train"), ("eval_dataset", "input:validation")):
        names = getattr(arguments, option) or ([default] if default.partition(":")[2] in inputs else [])
        for name in names:
            for file in _files(name, inputs, source):
                shown = os.path.relpath(file, source) if source and file.is_relative_to(source) else str(file)
                if wrong := _first_wrong(file, arguments):
                    place, text = wrong
                    yield f"--{option} {name}: {shown}{place}: {text}"


def _files(name: str, inputs: Mapping[str, str], source: Path | None) -> list[Path]:
    """Return the files of rows that a name stands for on this machine."""
    if name == STDLIB or "{" in name:
        return []
    if name.startswith("input:"):
        which, _, below = name.removeprefix("input:").partition("/")
        if not inputs.get(which):
            return []
        path = Path(inputs[which], below)
    elif source is None or os.path.isabs(name) or name.startswith("~"):
        return []
    else:
        path = source / name
    if path.is_file():
        return [path]  # named itself: one of another kind is refused too
    if path.is_dir():
        found = files_below(path)
    else:
        found = (Path(match) for match in sorted(glob.iglob(str(path), recursive=True)) if os.path.isfile(match))
    return [file for file in islice(found, MOST_FILES) if file.suffix.lower() in ENDINGS]


def _first_wrong(file: Path, arguments: Arguments) -> tuple[str, str] | None:
    """Return where a file's first wrong row is (":3", or "" for the whole file), and what is wrong; None for none."""
    if file.suffix.lower() not in ENDINGS:
        if arguments.kind.needs_rows:
            example = arguments.kind.example(arguments)
            return "", f"{arguments.task} reads rows: jsonl, csv or parquet, each row like {example}"
        return None
    try:
        for line, row in islice(numbered_rows(file), FIRST):
            if wrong := wrong_row(row, arguments):
                if isinstance(row, Mapping):
                    for column in arguments.kind.columns(arguments).missing(row):
                        line = line_of(str(file), line, row, column)
                return f":{line}", f"{wrong} (expected: {arguments.kind.example(arguments)})"
    except ImportError:  # pyarrow, which a node has
        return None
    except NotJson as error:
        return f":{error.line}", str(error)
    except (ValueError, csv.Error) as error:
        return "", f"cannot be read: {error}"
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
    return None


def wrong_row(row: Any, arguments: Arguments) -> str:
    """Return what is wrong with a row for the task, "" for nothing."""
    if not isinstance(row, Mapping):
        return f"the row is {_kind(row)}, not an object with columns"
    kind = arguments.kind
    if missing := kind.columns(arguments).missing(row):
        lacks = f"the row has no {', '.join(missing)!r}; it has: {', '.join(map(str, row)) or 'no columns'}"
        options = [option for column, option in kind.column_options(arguments).items() if column in missing]
        return f"{lacks}; name your own with {', '.join(options)}" if options else lacks
    return kind.wrong_row(row, arguments)


def _kind(value: Any) -> str:
    kinds = {str: "a text", list: "a list", type(None): "null", bool: "true or false"}
    return kinds.get(type(value), "a number")
