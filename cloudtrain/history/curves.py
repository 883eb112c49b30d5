"""Reads metric curves, downsampled to a given number of points.

The table `curves` holds one block for the points of one metric in 1,024 numbered log lines of one node: a million points
are a thousand rows. Where blocks are too coarse, the points are read from the table `metrics`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cloudtrain.history.database import Database
from cloudtrain.history.migrations import BLOCK

MOST = 1000  # default number of points of a curve
LOSSES = ("loss", "train_loss", "train/loss", "training_loss")


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


@dataclass(frozen=True)
class Summary:
    """Summary of one curve; `first` and `last` by time, `lowest` and `highest` among finite values (else NaN)."""

    name: str
    points: int
    first: float
    last: float
    lowest: float
    highest: float
    step: int  # of the last point
    at: str  # time of the last point


@dataclass(frozen=True)
class _Block:
    attempt_id: str
    attempt: int
    node: int
    block: int
    points: int
    finite: int
    total: float
    lowest: float | None
    highest: float | None
    step: int
    first_step: int
    at: str = ""


class Curves:
    """Queries for the curves of all runs in one history; every method runs one or two SQL queries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def summary(self, run_id: str) -> list[Summary]:
        """Return a summary of each curve of a run, in the order of their first points."""
        return self._summary("a.run_id = ?", run_id)

    def of_attempt(self, attempt_id: str) -> list[Summary]:
        """Return a summary of each curve of one attempt."""
        return self._summary("a.attempt_id = ?", attempt_id)

    def newest(self, run_id: str) -> list[Summary]:
        """Return the last point of each curve of a run's newest attempt; the other fields describe the last block only.

        The time does not depend on the length of the curves: the query skips from one name to the next in the index.
        """
        names = (
            "WITH RECURSIVE newest(attempt_id) AS (SELECT attempt_id FROM attempts WHERE run_id = ? ORDER BY number DESC"
            " LIMIT 1), leap(name) AS (SELECT min(name) FROM curves WHERE attempt_id = (SELECT attempt_id FROM newest)"
            " UNION ALL SELECT (SELECT min(name) FROM curves WHERE attempt_id = (SELECT attempt_id FROM newest) AND"
            " name > leap.name) FROM leap WHERE leap.name IS NOT NULL)"
            " SELECT (SELECT attempt_id FROM newest), name FROM leap WHERE name IS NOT NULL"
        )
        query = (
            "SELECT name, points, first_value, last_value, lowest, highest, last_step, last_at FROM curves"
            " WHERE attempt_id = ? AND name = ? ORDER BY node DESC, block DESC LIMIT 1"
        )
        with self._database.read() as db:
            rows = [
                db.execute(query, tuple(name_row)).fetchone() for name_row in db.execute(names, (run_id,)).fetchall()
            ]
        return [
            Summary(name, points, _to_float(first), _to_float(last), _to_float(lowest), _to_float(highest), step, at)
            for name, points, first, last, lowest, highest, step, at in rows
        ]

    def metric_names(self, attempt_id: str, before: int) -> set[str]:
        """Return the names of an attempt's metrics that have points with a sequence number below `before`."""
        query = "SELECT DISTINCT name FROM curves WHERE attempt_id = ? AND block < ?"
        with self._database.read() as db:
            return {row[0] for row in db.execute(query, (attempt_id, before // BLOCK))}

    def first(self, attempt_id: str, since: int, before: int) -> tuple[int, str] | None:
        """Return sequence number and name of node 0's first point with since <= number < before, or None."""
        query = "SELECT seq, name FROM metrics WHERE attempt_id = ? AND node = 0 AND seq >= ? AND seq < ? ORDER BY seq LIMIT 1"
        with self._database.read() as db:
            row = db.execute(query, (attempt_id, since, before)).fetchone()
        return (row[0], row[1]) if row else None

    def _summary(self, condition: str, owner_id: str) -> list[Summary]:
        query = (
            "SELECT c.name, c.points, c.first_value, c.last_value, c.lowest, c.highest, c.last_step, c.last_at"
            f" FROM curves c JOIN attempts a USING (attempt_id) WHERE {condition}"
            " ORDER BY a.number, c.node, c.block, c.name"
        )
        summaries: dict[str, Summary] = {}
        with self._database.read() as db:
            for name, points, first, last, lowest, highest, step, at in db.execute(query, (owner_id,)):
                earlier = summaries.get(name)
                summaries[name] = Summary(
                    name,
                    points + (earlier.points if earlier else 0),
                    earlier.first if earlier else _to_float(first),
                    _to_float(last),
                    _extreme(min, earlier.lowest if earlier else None, lowest),
                    _extreme(max, earlier.highest if earlier else None, highest),
                    step,
                    at,
                )
        return list(summaries.values())

    def last(self, run_ids: Sequence[str], names: Sequence[str] = LOSSES) -> dict[str, Summary]:
        """Return run id -> last point of the first of `names` that the run has; fast for long curves too."""
        placeholders = ", ".join("?" for _ in names)
        runs_query = (  # one query for the runs that have such a metric: in a long history most have none
            "SELECT DISTINCT a.run_id FROM json_each(?) AS wanted JOIN attempts a ON a.run_id = wanted.value WHERE EXISTS"
            f" (SELECT 1 FROM curves c WHERE c.attempt_id = a.attempt_id AND c.name IN ({placeholders}))"
        )
        query = (
            "SELECT c.name, c.last_value, c.last_step, c.last_at FROM attempts a JOIN curves c USING (attempt_id)"
            " WHERE a.run_id = ? AND c.name = ? ORDER BY a.number DESC, c.node DESC, c.block DESC LIMIT 1"
        )
        last_points = {}
        with self._database.read() as db:
            for (run_id,) in db.execute(runs_query, (json.dumps(list(run_ids)), *names)).fetchall():
                for name in names:
                    if row := db.execute(query, (run_id, name)).fetchone():
                        value = _to_float(row[1])
                        last_points[run_id] = Summary(name, 1, value, value, value, value, row[2], row[3])
                        break
        return last_points

    def points(self, run_id: str, name: str, most: int = MOST) -> list[Point]:
        """Return a curve in at most `most` points (a few more where a new attempt begins), each with its lowest and
        highest value. The first point has the step of the curve's first value, every other one that of its last."""
        blocks = self._blocks(run_id, name)
        count = sum(block.points for block in blocks)
        if count <= 2 * most or len(blocks) <= most // 8:  # blocks alone would be too coarse
            points = list(_downsample(self._single_points(blocks, name), most))
        else:
            points = list(_downsample((_block_point(block) for block in blocks), most))
        if len(points) > 1 and points[0].points > 1:
            points[0] = replace(points[0], step=blocks[0].first_step)
        return points

    def tail(self, run_id: str, name: str, most: int) -> list[float]:
        """Return the end of a curve in about `most` values, the oldest first. A longer curve is averaged over neighbours,
        a much longer one over blocks."""
        query = (
            "SELECT c.attempt_id, a.number, c.node, c.block, c.points, c.finite, c.total, c.lowest, c.highest,"
            " c.last_step, c.first_step FROM attempts a JOIN curves c USING (attempt_id) WHERE a.run_id = ? AND"
            " c.name = ? ORDER BY a.number DESC, c.node DESC, c.block DESC LIMIT ?"
        )
        with self._database.read() as db:
            blocks = [_Block(*row) for row in db.execute(query, (run_id, name, most))][::-1]
        if len(blocks) < most // 2 or sum(block.points for block in blocks) <= 4 * most:
            points: Iterable[Point] = _downsample(self._single_points(blocks, name), most)
        else:
            points = map(_block_point, blocks)
        return [point.value for point in points if math.isfinite(point.value)][-most:]

    def _blocks(self, run_id: str, name: str) -> list[_Block]:
        query = (
            "SELECT c.attempt_id, a.number, c.node, c.block, c.points, c.finite, c.total, c.lowest, c.highest,"
            " c.last_step, c.first_step, c.last_at FROM attempts a JOIN curves c USING (attempt_id) WHERE a.run_id = ? AND"
            " c.name = ? ORDER BY a.number, c.node, c.block"
        )
        with self._database.read() as db:
            return [_Block(*row) for row in db.execute(query, (run_id, name))]

    def _single_points(self, blocks: Sequence[_Block], name: str) -> Iterator[Point]:
        """Yield the single points of some blocks."""
        query = (
            "SELECT step, value, at FROM metrics WHERE attempt_id = ? AND node = ? AND seq >= ? AND seq < ? AND name = ?"
            " ORDER BY seq"
        )
        with self._database.read() as db:
            for block in blocks:
                first = block.block * BLOCK
                for step, value, at in db.execute(query, (block.attempt_id, block.node, first, first + BLOCK, name)):
                    number = _to_float(value)
                    finite = number if math.isfinite(number) else math.nan
                    yield Point(block.attempt, step, finite, finite, finite, 1, at)


def share(value: float, low: float, high: float) -> float:
    """Return the position of a value between two others, 0 to 1 (0 where they are equal); finite numbers of any size."""
    if math.isinf(high - low):  # the difference overflows, half of it does not
        value, low, high = value / 2, low / 2, high / 2
    return (value - low) / (high - low) if high > low else 0.0


def _block_point(block: _Block) -> Point:
    mean = block.total / block.finite if block.finite else math.nan
    lowest, highest = _to_float(block.lowest), _to_float(block.highest)
    return Point(block.attempt, block.step, mean, lowest, highest, block.points, block.at)


def _downsample(points: Iterable[Point], most: int) -> Iterator[Point]:
    """Merge neighbouring points of one attempt until about `most` are left."""
    all_points = list(points)
    size = math.ceil(len(all_points) / max(most, 1))
    if size <= 1:
        yield from all_points
        return
    start = 0
    while start < len(all_points):
        end = start + 1
        while end < len(all_points) and end - start < size and all_points[end].attempt == all_points[start].attempt:
            end += 1
        yield _merge(all_points[start:end])
        start = end


def _merge(points: Sequence[Point]) -> Point:
    finite = [point for point in points if math.isfinite(point.value)]
    weight = sum(point.points for point in finite)
    return Point(
        points[-1].attempt,
        points[-1].step,
        sum(point.value * point.points for point in finite) / weight if weight else math.nan,
        min((point.lowest for point in finite), default=math.nan),
        max((point.highest for point in finite), default=math.nan),
        sum(point.points for point in points),
        points[-1].at,
    )


def _extreme(choose: Callable[[list[float]], float], first: float | None, second: float | None) -> float:
    """Return min or max (`choose`) of two values, either of which may be missing; NaN where both are."""
    numbers = [value for value in (first, second) if value is not None and not math.isnan(value)]
    return choose(numbers) if numbers else math.nan


def _to_float(value: float | None) -> float:
    return math.nan if value is None else value
