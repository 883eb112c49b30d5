"""A comparison of runs as one self-contained page of HTML: the runs, their curves, and the values in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest
from cloudtrain.report import compare, page, plots

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

MAX_RUNS = 200
MANY_RUNS = 12  # more have fewer points and no bands
POINTS, POINTS_OF_MANY = 600, 100  # of a curve


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
    """Return the curves of all metrics as HTML, empty where there are none."""
    rank = style.get("rank", 0)
    stored = list(_metrics(store, ids, rank))
    if not stored:
        return ""
    few = len(ids) <= MANY_RUNS
    points = POINTS if few else POINTS_OF_MANY
    figure = plots.curves(store, ids, labels=labels, stored=stored, most=points, bands=few, **style)
    if not few:
        figure.update_layout(hovermode="closest")  # else the tooltip is longer than the screen
    return page.figure("curves", figure)


def _metrics(store: Store, ids: Sequence[str], rank: int | None) -> Iterable[str]:
    from cloudtrain.history.curves import metric_order

    return sorted({row.name for run_id in ids for row in store.curves.summary(run_id, rank)}, key=metric_order)
