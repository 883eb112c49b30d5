"""Plotly figures of many runs at once: a scatter of two columns, and parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.history.columns import find_column
from cloudtrain.job.units import format_number
from cloudtrain.report.plots import colour_of, escape_name, new_grid

MOST_CHOICES = 30  # different texts on one axis of parallel coordinates
LONGEST_CHOICE = 24  # characters of each
LOG_FROM = 100  # an axis of numbers that differ by this factor is logarithmic
COLOURS = "Portland"  # blue to red: each is seen on white and on black


def scatter(
    labels: Sequence[str], x: tuple[str, Sequence[Any]], y: tuple[str, Sequence[Any]], *, log_x: bool, log_y: bool
) -> Any:
    """Return a figure with a point for each run, in the colour of its curve; x and y are a column and its values."""
    figure = new_grid([""])
    for number, label in enumerate(labels):
        if x[1][number] is None or y[1][number] is None:
            continue
        figure.add_scatter(
            x=[value_of(*x, number)], y=[value_of(*y, number)], mode="markers", name=escape_name(label), showlegend=False,
            marker={"size": 9, "color": colour_of(number)}, hoverlabel={"bordercolor": colour_of(number)},
        )  # fmt: skip
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(title_text=escape_name(x[0]), type="log" if log_x else None)
    figure.update_yaxes(title_text=escape_name(y[0]), type="log" if log_y else None)
    return figure


def parallel(columns: Sequence[tuple[str, Sequence[Any]]]) -> Any:
    """Return parallel coordinates: an axis for each column, a line for each run, coloured by the last column.

    A run without a value of some metric has no line. Raises BadRequest where no run has all of them.
    """
    import plotly.graph_objects

    metrics = [values for name, values in columns if name.startswith("metric.")]
    whole = [at for at in range(len(columns[0][1])) if all(values[at] is not None for values in metrics)]
    if not whole:
        raise BadRequest("no run has values of all these metrics")
    dimensions = [_dimension(name, [value_of(name, values, at) for at in whole]) for name, values in columns]
    line = {"color": dimensions[-1]["values"], "colorscale": COLOURS, "showscale": False}
    figure = plotly.graph_objects.Figure(plotly.graph_objects.Parcoords(dimensions=dimensions, line=line))
    figure.update_layout(template="plotly_white", height=360, margin={"l": 70, "r": 50, "t": 50, "b": 30})
    return figure


def value_of(name: str, values: Sequence[Any], at: int) -> Any:
    """Return a value as a number where it is one: labels and hyperparameters are stored as texts."""
    column = find_column(name)
    try:
        return float(values[at]) if column is not None and column.kind == "value" else values[at]
    except (TypeError, ValueError):
        return values[at]


def _dimension(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return an axis: of numbers, or of choices, which are texts, missing values and few numbers that were given."""
    label = escape_name(name)
    numbers = {value for value in values if isinstance(value, int | float)}
    if numbers.issuperset(values) and (len(numbers) > MOST_CHOICES or not name.startswith("hp.")):
        if (
            min(numbers) > 0 and LOG_FROM * min(numbers) <= max(numbers) < math.inf
        ):  # learning rates of several powers of ten
            return {
                "label": label,
                "values": [math.log10(value) for value in values],
                **_powers(min(numbers), max(numbers)),
            }
        plain = 1 <= max(map(abs, numbers)) < 1e6
        return {"label": label, "values": list(values), "tickformat": ",.4~r" if plain else ".3~g"}
    texts = {
        value: "–" if value is None else format_number(value) if value in numbers else str(value) for value in values
    }
    choices = sorted(
        texts, key=lambda value: (value not in numbers, value is None, value if value in numbers else texts[value])
    )
    places = {value: min(place, MOST_CHOICES) for place, value in enumerate(choices)}
    shown = choices[:MOST_CHOICES]
    return {
        "label": label,
        "values": [places[value] for value in values],
        "tickvals": [places[value] for value in shown],
        "ticktext": [escape_name(texts[value][:LONGEST_CHOICE]) for value in shown],
    }


def _powers(lowest: float, highest: float) -> dict[str, Any]:
    """Return the ticks of a logarithmic axis: its ends and the powers of ten between them."""
    inner = [10.0**power for power in range(math.ceil(math.log10(lowest)), math.floor(math.log10(highest)) + 1)]
    inner = [value for value in inner if lowest * 1.5 < value < highest / 1.5]
    ticks = [lowest, *inner, highest]
    return {
        "range": [math.log10(lowest), math.log10(highest)],
        "tickvals": [math.log10(value) for value in ticks],
        "ticktext": [format_number(value, 2) for value in ticks],
    }
