"""Reads tables that a script prints row by row below a heading: fastai's, Ultralytics', spaCy's."""

from __future__ import annotations

import re

from cloudtrain.metrics.dicts import to_number
from cloudtrain.metrics.names import Kind, clean_name, kind

_GAPS = re.compile(r"\s{2,}|\t")
_HOLDS_NUMBER = re.compile(r"(?:^|\s)\d")
_FIRST = re.compile(r"(\d{1,12})(?:/\d+)?$")
_AXES = {
    "epoch": "epoch",
    "e": "epoch",
    "step": "step",
    "iter": "step",
    "iteration": "step",
    "#": "step",
    "round": "step",
}
MOST_COLUMNS = 40


class Table:
    """The heading of the newest table of one rank."""

    def __init__(self) -> None:
        self._columns: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether a heading was read."""
        return bool(self._columns)

    def read(self, text: str) -> tuple[dict[str, int], dict[str, float]] | None:
        """Take a heading, or return the axes (step, epoch) and the metrics of a row; None where the line is neither's."""
        if not self._columns or not is_row(text):
            self._take_heading(text)
            return None
        cells = text.split()
        if len(cells) != len(self._columns) or not _FIRST.match(cells[0]):
            return None
        axes: dict[str, int] = {}
        values: dict[str, float] = {}
        for column, cell in zip(self._columns, cells, strict=True):
            if axis := _AXES.get(column):
                if match := _FIRST.match(cell):
                    axes[axis] = int(match[1])
            elif (value := to_number(cell)) is not None and kind(column) is not Kind.SETTING:
                values[column] = value
        return axes, values

    def _take_heading(self, text: str) -> None:
        """Remember a line of names that begins with an axis and holds a metric."""
        if _HOLDS_NUMBER.search(text):  # most lines
            return
        words = text.split()
        if len(words) < 3 or len(words) > 3 * MOST_COLUMNS or words[0].lower() not in _AXES:
            return
        columns = [name for name in _GAPS.split(text.strip()) if name]
        names = [clean_name(name) if name != "#" else name for name in (columns if len(columns) > 2 else words)]
        if any(kind(name) is Kind.METRIC for name in names):
            self._columns = names


def is_row(text: str) -> bool:
    """Return whether a line may be a row: its first word is a number, or two as in 3/20."""
    words = text[:40].split(None, 1)
    return bool(words) and words[0].replace("/", "", 1).isdigit()
