"""The last value of each metric of a run and its extremes (`run_metrics`), updated with every batch of points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from cloudtrain.events import Event

Values = tuple[str, int, int, float | None, float | None, float | None, int]  # of one metric: as ADD_METRIC takes them

_LOWER = "excluded.rank < run_metrics.rank"  # a metric that rank 0 has not logged is that of the lowest rank that has
_NEWER = f"({_LOWER} OR (excluded.attempt, excluded.seq) >= (run_metrics.attempt, run_metrics.seq))"


def _extreme(name: str, choose: str) -> str:
    both = f"coalesce({choose}(excluded.{name}, run_metrics.{name}), excluded.{name}, run_metrics.{name})"
    return f"{name} = CASE WHEN {_LOWER} THEN excluded.{name} ELSE {both} END"


ADD_METRIC = (
    "INSERT INTO run_metrics (name, run_id, rank, attempt, seq, last, lowest, highest, step)"
    " SELECT ?1, run_id, ?2, number, ?3, ?4, ?5, ?6, ?7 FROM attempts WHERE attempt_id = ?8"
    " ON CONFLICT (name, run_id) DO UPDATE SET rank = excluded.rank, "
    + ", ".join(
        f"{name} = CASE WHEN {_NEWER} THEN excluded.{name} ELSE run_metrics.{name} END"
        for name in ("attempt", "seq", "last", "step")
    )
    + f", {_extreme('lowest', 'min')}, {_extreme('highest', 'max')} WHERE excluded.rank <= run_metrics.rank"
)


def summarize(points: Iterable[tuple[Event, int, str, float | None, int, float | None]]) -> list[Values]:
    """Return name, rank, seq, last, lowest and highest value and step of each metric of a batch, of its lowest rank."""
    found: dict[str, list[Any]] = {}
    for event, step, name, value, rank, _ in points:
        finite = value if value is not None and math.isfinite(value) else None
        known = found.get(name)
        if known is None or rank < known[1]:
            found[name] = [name, rank, event.seq, value, finite, finite, step]
        elif rank == known[1]:
            if event.seq >= known[2]:
                known[2], known[3], known[6] = event.seq, value, step
            if finite is not None:
                if known[4] is None or finite < known[4]:
                    known[4] = finite
                if known[5] is None or finite > known[5]:
                    known[5] = finite
    return [tuple(values) for values in found.values()]
