"""Lists and charts drawn by the browser from data: one NiceGUI element for a list, because one for each cell is slow.

    runs.js     the table of runs
    lines.js    a window of a log
    legend.js   the runs of a comparison
    chart.js    a chart of plotly

The lists' scripts use Vue's `h`: every text becomes a text node, never markup.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


def chart(figure: dict[str, Any]) -> Any:
    """Draw a figure of plotly; its `update_figure` draws another one. Emits `plotly_click`."""
    return _chart_class()(figure)


def runs_table() -> Any:
    """Draw the table of runs. The props `heads` and `rows` are in runs.js; emits `choose` and `sort`."""
    table = _element_class("runs")()
    table.props["heads"], table.props["rows"] = (), ()
    return table


def legend() -> Any:
    """Draw the runs of a comparison. The prop `rows` is in legend.js; emits `hide`, `only`, `baseline` and `colour`."""
    runs = _element_class("legend")()
    runs.props["rows"] = ()
    return runs


def log_window() -> Any:
    """Draw a window of a log. The prop `lines` has (number, prefix, text), the other props are in lines.js; emits `go`."""
    window = _element_class("lines")()
    window.props["lines"], window.props["marked"] = (), -1
    return window


@cache
def _chart_class() -> type[Any]:
    from nicegui.elements.plotly import Plotly

    class Drawn(Plotly, component=Path(__file__).parent / "chart.js"):
        """NiceGUI's element for plotly, with our script."""

    return Drawn


@cache
def _element_class(name: str) -> type[Any]:
    from nicegui.element import Element

    class Drawn(Element, component=Path(__file__).parent / f"{name}.js"):
        """An element of one of our scripts; its URL changes with the file, so that browsers may cache it."""

    return Drawn
