"""Fit table columns into a terminal: display width of text, folding of long cells."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

GAP = 2  # blanks between two columns
MIN_WIDTH = 8  # no column becomes narrower


def display_width(text: str) -> int:
    """Return the display width of a text in columns: 2 for a wide character, 0 for a combining one."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def pad(text: str, width: int, right: bool = False) -> str:
    """Pad a text with blanks to `width` columns, on the left with `right`."""
    blanks = " " * (width - display_width(text))
    return blanks + text if right else text + blanks


def cut(text: str, width: int) -> str:
    """Cut a line to at most `width` columns; a tab counts as one blank."""
    text = text.replace("\t", " ")
    if text.isascii():
        return text[: max(width, 0)]
    used = 0
    for index, char in enumerate(text):
        used += display_width(char)
        if used > width:
            return text[:index]
    return text


def fold(text: str, width: int) -> list[str]:
    """Wrap a text into lines of at most `width` columns, at blanks where possible."""
    if display_width(text) <= width:
        return [text]
    if display_width(text) == len(text):
        import textwrap

        return textwrap.wrap(text, width, break_on_hyphens=False, drop_whitespace=True) or [""]
    lines, line = [], ""
    for char in text:
        if line and display_width(line + char) > width:
            lines.append(line)
            line = ""
        line += char
    return [*lines, line]


def fit_widths(widths: Sequence[int], whole: Sequence[bool], total: int) -> list[int]:
    """Return column widths that fit into `total`: the widest shrinks first, columns marked in `whole` never shrink."""
    fitted_widths = list(widths)
    while (over := sum(fitted_widths) + GAP * (len(fitted_widths) - 1) - total) > 0:
        foldable = sorted(
            (fitted_widths[index] for index in range(len(fitted_widths)) if not whole[index]), reverse=True
        )
        if not foldable or foldable[0] <= MIN_WIDTH:
            break
        widest, second_widest = foldable[0], next((width for width in foldable if width < foldable[0]), MIN_WIDTH)
        index = next(
            index for index in range(len(fitted_widths)) if not whole[index] and fitted_widths[index] == widest
        )
        fitted_widths[index] = max(widest - over, min(second_widest, widest - 1), MIN_WIDTH)
    return fitted_widths


def row_lines(row: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the lines of a table row, with one text for every column."""
    return list(zip_longest(*(fold(cell, width) for cell, width in zip(row, widths, strict=True)), fillvalue=""))
