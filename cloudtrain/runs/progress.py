"""How far a run is, how long it still takes and what it costs at the end, by the run's own speed; and what was forecast."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cloudtrain.events import State
from cloudtrain.history.sampling import Point
from cloudtrain.job.units import HOUR_S, format_duration, unix_time
from cloudtrain.runs.planning import spend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

LEAST = 20  # steps of an attempt, before its speed is taken for that of the rest
_WINDOWS = 10


@dataclass(frozen=True)
class Progress:
    """How far a run is, after the last step that it has reported.

    Attributes:
        step, steps: done and in all.
        left_s: from, to; None before LEAST steps of the newest attempt.
        usd: spent so far; None where no price is known.
        usd_end: from, to at the end; None where one of both is not known.
    """

    step: int
    steps: int
    left_s: tuple[float, float] | None
    usd: float | None
    usd_end: tuple[float, float] | None

    @property
    def line(self) -> str:
        """The progress in one line: `62%, 2h 10m to go, 18.40 USD so far, 29 to 31 at the end`."""
        parts = [f"{self.step / self.steps:.0%}"]
        if self.left_s:
            times = list(dict.fromkeys(format_duration(each) for each in self.left_s))
            parts.append(f"{' to '.join(times)} to go")
        if self.usd is not None:
            parts.append(f"{self.usd:.2f} USD so far")
        if self.usd_end:
            digits = 0 if self.usd_end[0] >= 10 else 2
            ends = list(dict.fromkeys(f"{each:.{digits}f}" for each in self.usd_end))
            parts.append(f"{' to '.join(ends)} at the end")
        return ", ".join(parts)


def of_run(store: Store, attempts: Sequence[AttemptRecord]) -> Progress | None:
    """Return how far a live run is; None where its steps are not known or it has ended. Blocking (the history)."""
    newest = attempts[-1]
    if newest.status.state is not State.RUNNING:
        return None
    steps, points = _steps(store, newest), _points(store, newest)
    if not steps or not points:
        return None
    left_s = _left_s(points, steps)
    total = spend.total(attempts, store.home)
    price = newest.plan.price
    usd = None if total.unpriced_s or not price else total.usd
    usd_end = None
    if usd is not None and price and left_s:
        rate = float(price["usd_per_hour"]) / HOUR_S
        usd_end = (usd + left_s[0] * rate, usd + left_s[1] * rate)
    return Progress(min(points[-1].step, steps), steps, left_s, usd, usd_end)


def compared(attempts: Sequence[AttemptRecord], home: Path) -> dict[str, Any] | None:
    """Return a run's forecast and, where it has succeeded, what it took: `forecast`, `took_s` and `usd`.

    The forecast is in the first attempt's plan, the times in the attempts: both stay in the history. None without one.
    """
    forecast = attempts[0].plan.time
    if not forecast:
        return None
    if attempts[-1].status.state is not State.SUCCEEDED:
        return {"forecast": forecast, "took_s": None, "usd": None}
    shares = [spend.share_of(attempt, home) for attempt in attempts]
    times = [(attempt.status.started_at, attempt.status.ended_at) for attempt in attempts]
    took_s = sum(unix_time(end) - unix_time(start) for start, end in times if start and end)
    usd = [share.usd for share in shares if share.usd is not None]
    return {
        "forecast": forecast,
        "took_s": round(took_s, 3),
        "usd": round(sum(usd), 2) if len(usd) == len(shares) else None,
    }


def describe_forecast(attempts: Sequence[AttemptRecord], home: Path) -> str:
    """Return the forecast of a run in one line, with what it took once it has succeeded; "" without one."""
    found = compared(attempts, home)
    if not found or "seconds" not in found["forecast"]:
        return ""
    text = str(found["forecast"]["line"]).partition(" (")[0]
    if found["took_s"] is None:
        return text
    return f"{text}; it took {format_duration(found['took_s'])}" + (f", {found['usd']:.2f} USD" if found["usd"] else "")


def _steps(store: Store, attempt: AttemptRecord) -> int:
    """Return how many steps a training has: the shared trainer reports it, a script's `fit` may say it; 0: not known."""
    counts = [
        event.data["total_steps"]
        for event in store.events(attempt.run_id, "world")
        if event.attempt == attempt.attempt_id and isinstance(event.data.get("total_steps"), int)
    ]
    return int(counts[-1] if counts else (attempt.plan.job.get("fit") or {}).get("steps") or 0)


def _points(store: Store, attempt: AttemptRecord) -> list[Point]:
    """Return points of the attempt's loss, by step; the first of many is left out, whose time is of a later step."""
    last = store.curves.last([attempt.run_id]).get(attempt.run_id)
    points = store.curves.points(attempt.run_id, last.name, 100, last.rank) if last else []
    own = [point for point in points if point.attempt == attempt.number and point.at and not point.lost]
    return own[1:] if len(own) > 1 and own[0].points > 1 else own


def _left_s(points: Sequence[Point], steps: int) -> tuple[float, float] | None:
    """Return the seconds that are left, from and to: by the mean pace, and how much it differs in ten parts of the attempt."""
    first, last = points[0], points[-1]
    if last.step - first.step < LEAST:
        return None
    marks = [first]
    for point in points[1:]:
        if point is last or point.step - marks[-1].step >= (last.step - first.step) / _WINDOWS:
            marks.append(point)
    paces = sorted(
        (unix_time(after.at) - unix_time(before.at)) / (after.step - before.step)
        for before, after in pairwise(marks)
        if after.step > before.step
    )
    mean = (unix_time(last.at) - unix_time(first.at)) / (last.step - first.step)
    # the mean over the rest varies less than one part does: as that over what was measured
    spread = (paces[-1 - len(paces) // 10] - paces[len(paces) // 10]) / 2 / max(1, len(paces)) ** 0.5
    left = max(0, steps - last.step)
    return left * max(0.0, mean - spread), left * (mean + spread)
