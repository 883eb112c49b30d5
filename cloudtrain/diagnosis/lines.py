"""Say of which kinds a line of text is, by `lines` of patterns.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

LONGEST = 2000  # characters of a text that are searched: several patterns take time that grows with its square


def is_line(kind: str, text: str) -> bool:
    """Return whether a line is of a kind, such as `progress` or `consequence`."""
    return bool(_line_kinds()[kind].search(text[:LONGEST]))


@cache
def parse(name: str) -> dict[str, Any]:
    """Return the tables of a file of this package."""
    return tomllib.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def join(alternatives: Sequence[str], flags: int = 0) -> re.Pattern[str]:
    """Return one pattern for a list of alternatives."""
    return re.compile("|".join(alternatives), flags)


@cache
def _line_kinds() -> Mapping[str, re.Pattern[str]]:
    return {kind: join(patterns) for kind, patterns in parse("patterns.toml")["lines"].items()}
