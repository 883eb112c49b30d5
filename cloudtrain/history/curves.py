"""Curves of runs, as few points as can be drawn: read from the blocks that the history keeps beside every metric.

A block sums up the points of one metric in 1,024 numbered lines of one node, so a million points are a thousand rows.
Where a block is not fine enough, the points themselves are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cloudtrain.history.database import Database
from cloudtrain.history.migrations import BLOCK

MOST = 1000  # points of a curve, unless another number is asked for
LOSSES = ("loss", "train_loss", "train/loss", "training_loss")


@dataclass(frozen=True)
class Point:
    """One point of a drawn curve: the mean of `points` values and what they lie between; NaN where none is finite."""

    attempt: int
    step: int
    value: float
    lowest: float
    highest: float
    points: int = 1
    at: str = field(default="", compare=False)  # when the last of them was emitted


@dataclass(frozen=True)
class Summary:
    """A whole curve in one row; `first` and `last` by time, `lowest` and `highest` among finite values (else NaN)."""

    name: str
    points: int
    first: float
    last: float
    lowest: float
    highest: float
    step: int  # of the last point
    at: str  # when it was seen


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
    """The curves of all runs in one history; every method is one or two questions."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def summary(self, run_id: str) -> list[Summary]:
        """Return every curve of a run in one row each, in the order of their first points."""
        return self._summary("a.run_id = ?", run_id)

    def of_attempt(self, attempt_id: str) -> list[Summary]:
        """Return every curve of one attempt in one row each."""
        return self._summary("a.attempt_id = ?", attempt_id)

    def newest(self, run_id: str) -> list[Summary]:
        """Return the last point of every curve of a run's newest attempt; `points` and the like are of its last block.

        How long the curves are does not matter: their names are found by leaps.
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
            rows = [db.execute(query, tuple(found)).fetchone() for found in db.execute(names, (run_id,)).fetchall()]
        return [
            Summary(name, points, _number(first), _number(last), _number(lowest), _number(highest), step, at)
            for name, points, first, last, lowest, highest, step, at in rows
        ]

    def heard(self, attempt_id: str, before: int) -> set[str]:
        """Return the names of an attempt's metrics that have points numbered below `before`."""
        query = "SELECT DISTINCT name FROM curves WHERE attempt_id = ? AND block < ?"
        with self._database.read() as db:
            return {row[0] for row in db.execute(query, (attempt_id, before // BLOCK))}

    def first(self, attempt_id: str, since: int, before: int) -> tuple[int, str] | None:
        """Return number and name of the first point of an attempt's node 0 that is numbered so, or None."""
        query = "SELECT seq, name FROM metrics WHERE attempt_id = ? AND node = 0 AND seq >= ? AND seq < ? ORDER BY seq LIMIT 1"
        with self._database.read() as db:
            row = db.execute(query, (attempt_id, since, before)).fetchone()
        return (row[0], row[1]) if row else None

    def _summary(self, where: str, name_of: str) -> list[Summary]:
        query = (
            "SELECT c.name, c.points, c.first_value, c.last_value, c.lowest, c.highest, c.last_step, c.last_at"
            f" FROM curves c JOIN attempts a USING (attempt_id) WHERE {where}"
            " ORDER BY a.number, c.node, c.block, c.name"
        )
        found: dict[str, Summary] = {}
        with self._database.read() as db:
            for name, points, first, last, lowest, highest, step, at in db.execute(query, (name_of,)):
                before = found.get(name)
                found[name] = Summary(
                    name,
                    points + (before.points if before else 0),
                    before.first if before else _number(first),
                    _number(last),
                    _least(min, before.lowest if before else None, lowest),
                    _least(max, before.highest if before else None, highest),
                    step,
                    at,
                )
        return list(found.values())

    def last(self, run_ids: Sequence[str], names: Sequence[str] = LOSSES) -> dict[str, Summary]:
        """Return the last point of the first of these metrics that a run has, by run id; the points before it do not
        matter to how long that takes."""
        known = ", ".join("?" for _ in names)
        some = (  # in one question which runs have any: most of a long history's have none, or none of these
            "SELECT DISTINCT a.run_id FROM json_each(?) AS wanted JOIN attempts a ON a.run_id = wanted.value WHERE EXISTS"
            f" (SELECT 1 FROM curves c WHERE c.attempt_id = a.attempt_id AND c.name IN ({known}))"
        )
        query = (
            "SELECT c.name, c.last_value, c.last_step, c.last_at FROM attempts a JOIN curves c USING (attempt_id)"
            " WHERE a.run_id = ? AND c.name = ? ORDER BY a.number DESC, c.node DESC, c.block DESC LIMIT 1"
        )
        found = {}
        with self._database.read() as db:
            for (run_id,) in db.execute(some, (json.dumps(list(run_ids)), *names)).fetchall():
                for name in names:
                    if row := db.execute(query, (run_id, name)).fetchone():
                        value = _number(row[1])
                        found[run_id] = Summary(name, 1, value, value, value, value, row[2], row[3])
                        break
        return found

    def points(self, run_id: str, name: str, most: int = MOST) -> list[Point]:
        """Return a curve in at most `most` points (a few more where attempts meet), each with its lowest and highest
        value; the first one's step is the curve's first, that of every other one the last of those it stands for."""
        blocks = self._blocks(run_id, name)
        count = sum(block.points for block in blocks)
        if count <= 2 * most or len(blocks) <= most // 8:  # blocks alone would be too coarse
            points = list(_thinned(self._raw(blocks, name), most))
        else:
            points = list(_thinned((_point(block) for block in blocks), most))
        if len(points) > 1 and points[0].points > 1:
            points[0] = replace(points[0], step=blocks[0].first_step)
        return points

    def tail(self, run_id: str, name: str, most: int) -> list[float]:
        """Return the end of a curve in about `most` values, the oldest first: means of neighbours where it is longer than
        that, and of blocks where it is far longer."""
        query = (
            "SELECT c.attempt_id, a.number, c.node, c.block, c.points, c.finite, c.total, c.lowest, c.highest,"
            " c.last_step, c.first_step FROM attempts a JOIN curves c USING (attempt_id) WHERE a.run_id = ? AND"
            " c.name = ? ORDER BY a.number DESC, c.node DESC, c.block DESC LIMIT ?"
        )
        with self._database.read() as db:
            blocks = [_Block(*row) for row in db.execute(query, (run_id, name, most))][::-1]
        if len(blocks) < most // 2 or sum(block.points for block in blocks) <= 4 * most:
            points: Iterable[Point] = _thinned(self._raw(blocks, name), most)
        else:
            points = map(_point, blocks)
        return [point.value for point in points if math.isfinite(point.value)][-most:]

    def _blocks(self, run_id: str, name: str) -> list[_Block]:
        query = (
            "SELECT c.attempt_id, a.number, c.node, c.block, c.points, c.finite, c.total, c.lowest, c.highest,"
            " c.last_step, c.first_step, c.last_at FROM attempts a JOIN curves c USING (attempt_id) WHERE a.run_id = ? AND"
            " c.name = ? ORDER BY a.number, c.node, c.block"
        )
        with self._database.read() as db:
            return [_Block(*row) for row in db.execute(query, (run_id, name))]

    def _raw(self, blocks: Sequence[_Block], name: str) -> Iterator[Point]:
        """Yield the points of some blocks, one by one."""
        query = (
            "SELECT step, value, at FROM metrics WHERE attempt_id = ? AND node = ? AND seq >= ? AND seq < ? AND name = ?"
            " ORDER BY seq"
        )
        with self._database.read() as db:
            for block in blocks:
                first = block.block * BLOCK
                for step, value, at in db.execute(query, (block.attempt_id, block.node, first, first + BLOCK, name)):
                    number = _number(value)
                    finite = number if math.isfinite(number) else math.nan
                    yield Point(block.attempt, step, finite, finite, finite, 1, at)


def share(value: float, low: float, high: float) -> float:
    """Return where a value stands between two others, 0 to 1 (0 where they are equal); finite numbers of any size."""
    if math.isinf(high - low):  # the distance is no number any more, half of it is
        value, low, high = value / 2, low / 2, high / 2
    return (value - low) / (high - low) if high > low else 0.0


def _point(block: _Block) -> Point:
    mean = block.total / block.finite if block.finite else math.nan
    lowest, highest = _number(block.lowest), _number(block.highest)
    return Point(block.attempt, block.step, mean, lowest, highest, block.points, block.at)


def _thinned(points: Iterable[Point], most: int) -> Iterator[Point]:
    """Yield neighbours of one attempt as one point, so that at most about `most` are left."""
    every = list(points)
    size = math.ceil(len(every) / max(most, 1))
    if size <= 1:
        yield from every
        return
    start = 0
    while start < len(every):
        end = start + 1
        while end < len(every) and end - start < size and every[end].attempt == every[start].attempt:
            end += 1
        yield _merged(every[start:end])
        start = end


def _merged(points: Sequence[Point]) -> Point:
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


def _least(choose: Callable[[list[float]], float], one: float | None, other: float | None) -> float:
    """Return the least (or whatever `choose` chooses) of what is known of two values."""
    known = [value for value in (one, other) if value is not None and not math.isnan(value)]
    return choose(known) if known else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value
