"""The shape that each task expects of a row, and the check of a file's first rows before anything is submitted.

It imports no torch. The training itself uses the same predicates.
"""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .documents import STDLIB, files_below
from .row_files import ENDINGS, PAIR, NotJson, line_of, numbered_rows

if TYPE_CHECKING:
    from ..arguments import Arguments

FIRST = 20  # rows of a file
MOST_FILES = 50  # of a folder
WHOLE_BYTES = 16 << 20  # of a .json file, which can only be read whole
_PREFERENCE = ["prompt", "chosen", "rejected"]
_MESSAGES = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
NO_MESSAGES = "it is not a list of messages with role and content"
NO_PAIR = "prompt, chosen and rejected must be texts, or all three lists of role and content"


def wrong_conversation(value: Any) -> str:
    """Return why a value is no conversation to learn from, "" where it is one."""
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    ):
        return NO_MESSAGES
    answers = [message["content"] for message in value if message["role"] == "assistant"]
    if not answers:
        return "no message by the assistant: there is nothing to learn"
    return "" if any(map(str.strip, answers)) else "the assistant's answer is empty: there is nothing to learn"


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of role and content."""
    return isinstance(value, list) and all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value
    )


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


def expected(arguments: Arguments) -> str:
    """Return a row that the task reads, for messages."""
    text = arguments.text_column
    return {
        "chat": f'{{"{arguments.messages_column}": {_MESSAGES}}}, or prompt and completion',
        "dpo": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
        "sequence-classification": f'{{"{text}": "...", "{arguments.label_column}": "..."}}',
    }.get(arguments.task, f'{{"{text}": "..."}}')


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
        if arguments.task in ("chat", "dpo", "sequence-classification"):
            return "", f"{arguments.task} reads rows: jsonl, csv or parquet, each row like {expected(arguments)}"
        return None
    try:
        for line, row in islice(numbered_rows(file, FIRST, WHOLE_BYTES), FIRST):
            if wrong := wrong_row(row, arguments):
                for column in _missing(row, arguments):
                    line = line_of(str(file), line, row, column)
                return f":{line}", f"{wrong} (expected: {expected(arguments)})"
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
    task = arguments.task
    if missing := _missing(row, arguments):
        lacks = f"the row has no {', '.join(missing)!r}; it has: {', '.join(map(str, row)) or 'no columns'}"
        options = [option for column, option in _options(arguments).items() if column in missing]
        return f"{lacks}; name your own with {', '.join(options)}" if options else lacks
    if task == "chat":
        messages = row.get(arguments.messages_column)
        if messages is None:
            pair = [("user", row["prompt"]), ("assistant", row["completion"])]
            messages = [{"role": role, "content": content} for role, content in pair]
        wrong = wrong_conversation(_parsed(messages))
        return f"{arguments.messages_column}: {wrong}" if wrong else ""
    if task == "dpo":
        values = [row[column] for column in _PREFERENCE]
        texts = all(isinstance(value, str) for value in values)
        return "" if texts or all(map(are_messages, values)) else NO_PAIR
    return ""


def _options(arguments: Arguments) -> dict[str, str]:
    """Return the columns that have an option of their own, with its name."""
    labels = {arguments.label_column: "label_column"} if arguments.task == "sequence-classification" else {}
    return {} if arguments.task in ("chat", "dpo") else {arguments.text_column: "text_column"} | labels


def _missing(row: Any, arguments: Arguments) -> list[str]:
    """Return the columns that the task needs and a row lacks; of preferences the first."""
    if not isinstance(row, Mapping) or (arguments.task == "chat" and row.keys() >= PAIR):
        return []
    needed = {"chat": [arguments.messages_column], "dpo": _PREFERENCE}.get(arguments.task, [*_options(arguments)])
    missing = [column for column in needed if row.get(column) is None]
    return missing[:1] if arguments.task == "dpo" else missing


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _kind(value: Any) -> str:
    kinds = {str: "a text", list: "a list", type(None): "null", bool: "true or false"}
    return kinds.get(type(value), "a number")
