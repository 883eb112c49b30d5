"""Plotly figures of a sweep: the best result so far, and the importance of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.report.plots import COLOURS, escape_name, new_grid


def best_so_far(metric: str, results: Sequence[tuple[int, float, bool]], *, minimize: bool) -> Any:
    """Return a figure with a point for each result, and a line of the best one so far.

    Args:
        metric: name of the values' axis.
        results: (trial, value, whether the trial was pruned), in the order of the trials. Pruned trials do not count.
        minimize: whether a smaller value is better.
    """
    figure = new_grid([""])
    for pruned, name, colour in ((False, "trial", COLOURS[0]), (True, "pruned trial", "#8a94a0")):
        points = [(number, value) for number, value, was_pruned in results if was_pruned == pruned]
        figure.add_scatter(
            x=[number for number, _ in points], y=[value for _, value in points], mode="markers", name=name,
            marker={"size": 7, "color": colour, "symbol": "x" if pruned else "circle"},
        )  # fmt: skip
    line: list[tuple[int, float]] = []
    for number, value, pruned in results:
        if not pruned and (not line or (value < line[-1][1] if minimize else value > line[-1][1])):
            line.append((number, value))
    if line:
        end = results[-1][0]
        figure.add_scatter(
            x=[*(number for number, _ in line), end], y=[*(value for _, value in line), line[-1][1]],
            mode="lines", line={"shape": "hv", "color": COLOURS[1]}, name="best so far",
        )  # fmt: skip
    figure.update_xaxes(title_text="trial")
    figure.update_yaxes(title_text=escape_name(metric))
    return figure


def importance_bars(shares: Mapping[str, float]) -> Any:
    """Return a figure with a bar for each parameter, its share of the variance in percent; the greatest is above."""
    figure = new_grid([""])
    names = [escape_name(name) for name in shares][::-1]
    figure.add_bar(
        x=[100 * share for share in shares.values()][::-1], y=names, orientation="h", marker={"color": COLOURS[0]},
        name="importance", hovertemplate="%{y}: %{x:.0f}%<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="share of the variance (%)", range=[0, 100])
    return figure
