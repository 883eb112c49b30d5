"""How curves are drawn on a page, as its address keeps it; and curves as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, get_args

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
