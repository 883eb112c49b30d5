"""The patterns without those that match one failure: what the verdict is for a message that no pattern was written for."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from cloudtrain.diagnosis import patterns
from cloudtrain.diagnosis.patterns import Pattern
from tests.diagnosis.entries import Entry


def without(entry: Entry) -> dict[str, list[Pattern]]:
    """Return the tables of patterns.toml without the alternatives of the entry's class that match its deciding line."""
    return {name: [row for row in table if not _matches(row, entry)] for name, table in _split_tables().items()}


def _matches(row: Pattern, entry: Entry) -> bool:
    deciding = str(entry.label["deciding"] or "")
    return row.label == entry.name and bool(deciding) and row.regex.search(deciding) is not None


@cache
def _split_tables() -> dict[str, list[Pattern]]:
    """Return the tables with one row for one alternative."""
    return {
        name: [
            replace(row, regex=re.compile(pattern, row.regex.flags))
            for row in table
            for pattern in alternatives(row.regex.pattern)
        ]
        for name, table in patterns.tables().items()
    }


def alternatives(pattern: str) -> list[str]:
    """Return the top-level alternatives of a regular expression."""
    parts, depth, in_brackets, index = [""], 0, False, 0
    while index < len(pattern):
        token = pattern[index : index + 2] if pattern[index] == "\\" else pattern[index]
        index += len(token)
        if token == "|" and not depth and not in_brackets:
            parts.append("")
            continue
        parts[-1] += token
        if in_brackets:
            in_brackets = token != "]"
        else:
            in_brackets = token == "["
            depth += (token == "(") - (token == ")")
    return parts
