"""Columns of a table within the width of a terminal: cells measured as a terminal shows them, long ones folded."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

GAP = 2  # blanks between columns
NARROWEST = 8  # a column is folded no further


def cells(text: str) -> int:
    """Return how many columns a terminal needs for a text: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def pad(text: str, width: int, right: bool = False) -> str:
    """Return a text with blanks up to so many columns of a terminal."""
    blanks = " " * (width - cells(text))
    return blanks + text if right else text + blanks


def cut(text: str, width: int) -> str:
    """Return the beginning of a line, at most so many columns of a terminal; a tab is one blank."""
    text = text.replace("\t", " ")
    if text.isascii():
        return text[: max(width, 0)]
    taken = 0
    for at, char in enumerate(text):
        taken += cells(char)
        if taken > width:
            return text[:at]
    return text


def fold(text: str, width: int) -> list[str]:
    """Return a text in lines of at most so many columns, broken at blanks where there are any."""
    if cells(text) <= width:
        return [text]
    if cells(text) == len(text):
        return textwrap.wrap(text, width, break_on_hyphens=False, drop_whitespace=True) or [""]
    lines, line = [], ""
    for char in text:
        if line and cells(line + char) > width:
            lines.append(line)
            line = ""
        line += char
    return [*lines, line]


def fitted(widths: Sequence[int], whole: Sequence[bool], total: int) -> list[int]:
    """Return widths that fit into `total`, the widest made narrower first; those that stay `whole` never are."""
    found = list(widths)
    while (over := sum(found) + GAP * (len(found) - 1) - total) > 0:
        foldable = sorted((found[at] for at in range(len(found)) if not whole[at]), reverse=True)
        if not foldable or foldable[0] <= NARROWEST:
            break
        widest, next_one = foldable[0], next((width for width in foldable if width < foldable[0]), NARROWEST)
        at = next(at for at in range(len(found)) if not whole[at] and found[at] == widest)
        found[at] = max(widest - over, min(next_one, widest - 1), NARROWEST)
    return found


def lines(row: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the lines of a row, each with a text for every column."""
    return list(zip_longest(*(fold(cell, width) for cell, width in zip(row, widths, strict=True)), fillvalue=""))
