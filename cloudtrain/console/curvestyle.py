"""How curves are drawn on a page, as its address keeps it; and curves as CSV."""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from cloudtrain.console import text
from cloudtrain.history.store import Store
from cloudtrain.report import plots


@dataclass
class CurveStyle:
    """Axis, smoothing, scales and search of the curves; the address of a page keeps them."""

    over: plots.Over = "step"
    rank: int | None = 0  # None draws a curve for each rank
    smoothing: float = 0.0
    log: bool = False
    log_x: bool = False
    search: str = ""
    hidden: frozenset[str] = frozenset()  # runs
    baseline: str = ""  # the run from which the others are shown as differences
    colours: Mapping[str, str] = field(default_factory=dict)
    some: Mapping[str, frozenset[str]] = field(default_factory=dict)  # chart -> its runs, where it shall not show all

    def address(self) -> dict[str, str]:
        """Return what differs from the defaults, for the query of an address."""
        usual = CurveStyle()
        shown = {name: getattr(self, name) for name in ("over", "smoothing", "log", "log_x", "search")}
        return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in shown.items()
                if value != getattr(usual, name)}  # fmt: skip


def of_address(over: str, smoothing: float, log: bool, log_x: bool, search: str) -> CurveStyle:
    """Return the style that an address asks for; what it cannot be is the default."""
    axis = cast(plots.Over, over) if over in get_args(plots.Over) else "step"
    return CurveStyle(axis, smoothing=min(max(smoothing, 0.0), 0.99), log=log, log_x=log_x, search=search)


def subtract(traces: Sequence[dict[str, Any]], baseline: str) -> None:
    """Make the curves of a figure differences from those of one run; curves of families from the member's own."""
    of_run = [trace for trace in traces if trace.get("meta") == baseline]
    group = of_run[0].get("legendgroup") if of_run else None
    points: dict[str, list[tuple[float, float]]] = {}
    for trace in of_run:
        known = sorted((x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if y is not None)
        points[str(trace["name"]).removeprefix(f"{group}")] = known
    for trace in traces:
        known = points.get(str(trace.get("name")).removeprefix(f"{trace.get('legendgroup')}"), [])
        if "meta" in trace:
            trace["y"] = [_above(known, x, y) for x, y in zip(trace["x"], trace["y"], strict=True)]
        else:  # bands, and what lies under a running mean
            trace["visible"] = False


def _above(known: Sequence[tuple[float, float]], x: float, y: float | None) -> float | None:
    """Return how far a point is above a curve, None outside of it."""
    at = bisect_left(known, (x, float("-inf")))
    if y is None or at == len(known) or (at == 0 and known[0][0] != x):
        return None
    (left, low), (right, high) = known[max(at - 1, 0)], known[at]
    return y - (high if right == left else low + (high - low) * (x - left) / (right - left))


def to_csv(store: Store, ids: Sequence[str], names: Sequence[str], labels: Mapping[str, str], rank: int | None) -> str:
    """Return the points of curves as CSV, of long ones in 1,000 points."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("run", "label", "metric", "attempt", "step", "epoch", "at", "value"))
    for run_id in ids:
        for name in names:
            for point in store.curves.points(run_id, name, rank=rank or 0):
                cells = (run_id, labels.get(run_id, ""), name, point.attempt, point.step, point.epoch, point.at)
                writer.writerow((*map(text.spreadsheet_cell, cells), point.value))
    return stream.getvalue()
