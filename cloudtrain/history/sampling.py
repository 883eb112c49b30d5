"""Points of metric curves, and their downsampling to a given number of points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Point:
    """One point of a downsampled curve: mean, lowest and highest of `points` values; NaN where none is finite."""

    attempt: int
    step: int
    value: float
    lowest: float
    highest: float
    points: int = 1
    at: str = field(default="", compare=False)  # time of the last value
    epoch: float | None = None  # of the last value, None where it is not known
    lost: bool = False  # a newer attempt resumed at this step or before it


@dataclass(frozen=True)
class Block:
    """A row of the table `curves`: the points of one metric in BLOCK numbered log lines of one node."""

    attempt_id: str
    attempt: int
    rank: int
    node: int
    block: int
    points: int
    finite: int
    total: float
    lowest: float | None
    highest: float | None
    step: int  # of the last point
    first_step: int
    at: str
    epoch: float | None

    def is_lost(self, lost_from: Mapping[int, int]) -> bool | None:
        """Return whether all points of the block are lost; None where only some may be.

        `lost_from` maps attempts to the step at which a newer attempt resumed.
        """
        resumed = lost_from.get(self.attempt)
        if resumed is None or max(self.first_step, self.step) < resumed:
            return False
        return True if min(self.first_step, self.step) >= resumed else None

    def as_point(self, *, lost: bool = False) -> Point:
        """Return the block as one point."""
        mean = self.total / self.finite if self.finite else math.nan
        lowest, highest = to_float(self.lowest), to_float(self.highest)
        return Point(self.attempt, self.step, mean, lowest, highest, self.points, self.at, self.epoch, lost)


def downsample(points: Iterable[Point], most: int) -> Iterator[Point]:
    """Merge neighbouring points of one attempt until about `most` are left; what is lost stays apart."""
    all_points = list(points)
    size = math.ceil(len(all_points) / max(most, 1))
    if size <= 1:
        yield from all_points
        return
    start = 0
    while start < len(all_points):
        end, part = start + 1, (all_points[start].attempt, all_points[start].lost)
        while end < len(all_points) and end - start < size and (all_points[end].attempt, all_points[end].lost) == part:
            end += 1
        yield _merge(all_points[start:end])
        start = end


def split_lost(points: Sequence[Point]) -> tuple[list[Point], list[list[Point]]]:
    """Return the curve without its lost parts, and each lost part; one begins with the point that it branches off from."""
    kept = [point for point in points if not point.lost]
    lost: list[list[Point]] = []
    for number, point in enumerate(points):
        before = points[number - 1] if number else None
        if not point.lost:
            continue
        if before is None or before.attempt != point.attempt:
            lost.append([point])
        elif not before.lost:
            lost.append([before, point])
        else:
            lost[-1].append(point)
    return kept, lost


def share(value: float, low: float, high: float) -> float:
    """Return the position of a value between two others, 0 to 1 (0 where they are equal); finite numbers of any size."""
    if math.isinf(high - low):  # the difference overflows, half of it does not
        value, low, high = value / 2, low / 2, high / 2
    return (value - low) / (high - low) if high > low else 0.0


def to_float(value: float | None) -> float:
    """Return a stored value as a number; NULL is not-a-number."""
    return math.nan if value is None else value


def _merge(points: Sequence[Point]) -> Point:
    finite = [point for point in points if math.isfinite(point.value)]
    weight = sum(point.points for point in finite)
    last = points[-1]
    return Point(
        last.attempt,
        last.step,
        sum(point.value * point.points for point in finite) / weight if weight else math.nan,
        min((point.lowest for point in finite), default=math.nan),
        max((point.highest for point in finite), default=math.nan),
        sum(point.points for point in points),
        last.at,
        last.epoch,
        last.lost,
    )
