"""Long lists that the browser draws from data: one element of NiceGUI each, where one for every cell took most of a page's time.

    runs.js     the table of runs
    lines.js    a window of a log

They make their elements with Vue's `h`, so that words become text nodes and never markup, whoever wrote them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


def runs_table(headers: tuple[tuple[str, str], ...]) -> Any:
    """Draw a table of runs: its heads as (words, CSS classes), its prop `rows` as the tuples of runs.js; it emits `choose`."""
    table = _element_class("runs")()
    table.props["heads"], table.props["rows"] = headers, ()
    return table


def log_window() -> Any:
    """Draw a window of a log: its prop `lines` as (number, meta, words), the others as in lines.js; it emits `go`."""
    window = _element_class("lines")()
    window.props["lines"], window.props["marked"] = (), -1
    return window


@cache
def _element_class(name: str) -> type[Any]:
    from nicegui.element import Element

    class Drawn(Element, component=Path(__file__).parent / f"{name}.js"):
        """What one file of ours draws; its address changes when the file does, so that browsers may keep it."""

    return Drawn
