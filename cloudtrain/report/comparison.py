"""A comparison of runs as one self-contained page of HTML: the runs, their curves, and the values in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest
from cloudtrain.report import compare, page, plots

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

MAX_RUNS = 200
MANY_RUNS = 12  # more have fewer points and no bands
POINTS, POINTS_OF_MANY, FEWEST_POINTS = 600, 100, 10  # of a curve
MOST_CURVES, MOST_POINTS = 4_000, 150_000  # of one file of many runs: at most 10 MB


def render(store: Store, run_ids: Sequence[str], **style: Any) -> str:
    """Return the page that compares runs; blocking. Raises BadRequest for a wrong number of runs, and without plotly.

    `style` is that of `plots.curves`: over, rank, smoothing, log, log_x.
    """
    ids = list(dict.fromkeys(run_ids))
    if not 1 < len(ids) <= MAX_RUNS:
        raise BadRequest(f"two to {MAX_RUNS} runs can be compared, and {len(ids)} were given")
    labels, rows = compare.describe_runs(store, ids), compare.among(store, ids)
    figure = _curves(store, ids, labels, style)
    records = [store.find(run_id) for run_id in ids]
    names = [labels[run_id] for run_id in ids]
    runs = [(labels[each.run_id], each.run_id, each.status.state.value, each.status.started_at, each.status.ended_at)
            for each in records]  # fmt: skip
    sections = [
        f"<h3>{page.escape_text(section.capitalize())}</h3>"
        + page.table(["value", *names], [(row.path, *row.values) for row in group])
        for section, group in groupby(rows, key=lambda row: row.section)
    ]
    parts = [
        f"<h1>{len(ids)} runs compared</h1>",
        page.table(("run", "id", "state", "started", "ended"), runs),
        "<h2>Curves</h2>" + (figure or '<p class="dim">no metrics</p>'),
        "<h2>Differences</h2>" + ("".join(sections) or '<p class="dim">nothing differs</p>'),
    ]
    return page.document(f"{len(ids)} runs compared", parts, plotly=bool(figure))


def write(store: Store, run_ids: Sequence[str], path: Path, **style: Any) -> Path:
    """Write the page that compares runs into a file and return it; an error leaves no part of it."""
    return page.write_text(path, render(store, run_ids, **style))


def _curves(store: Store, ids: Sequence[str], labels: dict[str, str], style: dict[str, Any]) -> str:
    """Return the curves of the metrics as HTML, empty where there are none."""
    from cloudtrain.report.sections import arrange

    rank = style.get("rank", 0)
    sections = arrange(row.name for run_id in ids for row in store.curves.summary(run_id, rank))
    every = [name for section in sections for chart in section.charts for name in chart.names]
    if not every:
        return ""
    few = len(ids) <= MANY_RUNS
    count, points = (len(every), POINTS) if few else share_of_many(len(ids), len(every))
    figure = plots.curves(store, ids, labels=labels, stored=every[:count], most=points, bands=few, **style)
    if few:
        return page.figure("curves", figure)
    figure.update_layout(hovermode="closest")  # else the tooltip is longer than the screen
    for trace in figure.data:
        trace.y = [None if value is None else float(f"{value:.5g}") for value in trace.y]
    told = f'<p class="dim">{count} of {len(every)} metrics, losses first</p>' if count < len(every) else ""
    return told + page.figure("curves", figure)


def share_of_many(runs: int, metrics: int) -> tuple[int, int]:
    """Return how many metrics of many runs one file has, and how many points a curve."""
    count = min(metrics, max(1, MOST_CURVES // runs))
    return count, min(POINTS_OF_MANY, max(FEWEST_POINTS, MOST_POINTS // (count * runs)))
