"""Metric curves, read downsampled to a given number of points. No curve mixes ranks.

The table `curves` holds one block for a rank's points of one metric in 1,024 numbered log lines of a node: a million points
are a thousand rows. Where blocks are too coarse, the points are read from the table `metrics`.

`rank` is 0 by default. A metric that rank 0 of the run has not logged is then that of the lowest rank that has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloudtrain.events import is_evaluation
from cloudtrain.history.database import Database, placeholders
from cloudtrain.history.file import repaired
from cloudtrain.history.migrations import BLOCK
from cloudtrain.history.sampling import Block, Point, downsample, to_float
from cloudtrain.job.units import natural_key

MOST = 1000  # default number of points of a curve
LOSSES = ("loss", "train_loss", "train/loss", "training_loss")


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
    rank: int = 0


_LOWEST = (  # one rank for all attempts of the run
    "c.rank = (SELECT min((SELECT min(low.rank) FROM curves low WHERE low.attempt_id = every.attempt_id AND"
    " low.name = c.name)) FROM attempts every"
    " WHERE every.run_id = (SELECT own.run_id FROM attempts own WHERE own.attempt_id = c.attempt_id))"
)
_BLOCKS = (
    "SELECT c.attempt_id, a.number, c.rank, c.node, c.block, c.points, c.finite, c.total, c.lowest, c.highest,"
    " c.last_step, c.first_step, c.last_at, c.last_epoch FROM attempts a JOIN curves c USING (attempt_id)"
    " WHERE a.run_id = ? AND c.name = ?"
)


def metric_order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return what sorts names of metrics: groups (`eval/loss`) last; numbered names as people count; others as they are."""
    grouped = "/" in name
    return grouped, natural_key(name) if grouped or any(map(str.isdigit, name)) else []


def of_rank(rank: int | None) -> str:
    """Return the SQL condition for rows `c` of the table `curves` that belong to a rank, None for all ranks."""
    return "1" if rank is None else f"c.rank = {int(rank)}" if rank else _LOWEST


@repaired
class Curves:
    """Queries for the curves of all runs in one history; every method runs one or two SQL queries."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def summary(self, run_id: str, rank: int | None = 0) -> list[Summary]:
        """Return a summary of each curve of a run, in the order of their first points; of all ranks for None."""
        query = (
            "SELECT c.name, c.rank, c.points, c.first_value, c.last_value, c.lowest, c.highest, c.last_step, c.last_at"
            f" FROM curves c JOIN attempts a USING (attempt_id) WHERE a.run_id = ? AND {of_rank(rank)}"
            " ORDER BY a.number, c.node, c.block, c.name"
        )
        summaries: dict[tuple[str, int | None], Summary] = {}
        with self.database.read() as db:
            for name, of, points, first, last, lowest, highest, step, at in db.execute(query, (run_id,)):
                key = name, (of if rank is None else rank)
                earlier = summaries.get(key)
                summaries[key] = Summary(
                    name,
                    points + (earlier.points if earlier else 0),
                    earlier.first if earlier else to_float(first),
                    to_float(last),
                    _extreme(min, earlier.lowest if earlier else None, lowest),
                    _extreme(max, earlier.highest if earlier else None, highest),
                    step,
                    at,
                    of,
                )
        return sorted(summaries.values(), key=lambda row: metric_order(row.name))

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
            "SELECT name, points, first_value, last_value, lowest, highest, last_step, last_at, rank FROM curves c"
            f" WHERE attempt_id = ? AND name = ? AND {_LOWEST} ORDER BY node DESC, block DESC LIMIT 1"
        )
        with self.database.read() as db:
            rows = [
                db.execute(query, tuple(name_row)).fetchone() for name_row in db.execute(names, (run_id,)).fetchall()
            ]
        return [
            Summary(name, points, to_float(first), to_float(last), to_float(low), to_float(high), step, at, rank)
            for name, points, first, last, low, high, step, at, rank in filter(None, rows)
        ]

    def metric_names(self, attempt_id: str, before: int) -> set[str]:
        """Return the names of an attempt's metrics that have points with a sequence number below `before`."""
        query = "SELECT DISTINCT name FROM curves WHERE attempt_id = ? AND block < ?"
        with self.database.read() as db:
            return {row[0] for row in db.execute(query, (attempt_id, before // BLOCK))}

    def drop_doubles(self, attempt_id: str, since: int) -> None:
        """Delete the points from sequence number `since`, a multiple of BLOCK, on of metrics that have points before it."""
        first = since // BLOCK
        with self.database.write() as db:
            query = (
                "SELECT DISTINCT name FROM curves WHERE attempt_id = ? AND block >= ?"
                " INTERSECT SELECT name FROM curves WHERE attempt_id = ? AND block < ?"
            )
            for (name,) in db.execute(query, (attempt_id, first, attempt_id, first)).fetchall():
                db.execute(
                    "DELETE FROM metrics WHERE attempt_id = ? AND seq >= ? AND name = ?", (attempt_id, since, name)
                )
                db.execute(
                    "DELETE FROM curves WHERE attempt_id = ? AND block >= ? AND name = ?", (attempt_id, first, name)
                )

    def first(self, attempt_id: str, since: int, before: int) -> tuple[int, str] | None:
        """Return sequence number and name of node 0's first point with since <= number < before, or None."""
        query = "SELECT seq, name FROM metrics WHERE attempt_id = ? AND node = 0 AND seq >= ? AND seq < ? ORDER BY seq LIMIT 1"
        with self.database.read() as db:
            row = db.execute(query, (attempt_id, since, before)).fetchone()
        return (row[0], row[1]) if row else None

    def last_steps(self, run_id: str) -> dict[int, dict[tuple[int, str], int]]:
        """Return attempt -> rank and name of a metric -> step of its last point there."""
        return self._of_last_points(run_id, "step")

    def last_epochs(self, run_id: str) -> dict[int, dict[tuple[int, str], float | None]]:
        """Return attempt -> rank and name of a metric -> epoch of its last point there, None where it has none."""
        return self._of_last_points(run_id, "epoch")

    def _of_last_points(self, run_id: str, column: str) -> dict[int, dict[tuple[int, str], Any]]:
        query = (
            f"SELECT a.number, c.rank, c.name, c.last_{column} FROM attempts a JOIN curves c USING (attempt_id)"
            " WHERE a.run_id = ? ORDER BY a.number, c.node, c.block"
        )
        last: dict[int, dict[tuple[int, str], Any]] = {}
        with self.database.read() as db:
            for attempt, rank, name, value in db.execute(query, (run_id,)):
                last.setdefault(attempt, {})[rank, name] = value
        return last

    def first_epoch(self, run_id: str) -> float | None:
        """Return the first epoch among a run's first 1,000 points, None where none has one."""
        query = (
            "SELECT epoch FROM (SELECT m.epoch FROM attempts a JOIN metrics m USING (attempt_id) WHERE a.run_id = ?"
            " ORDER BY a.number, m.node, m.seq LIMIT 1000) WHERE epoch IS NOT NULL LIMIT 1"
        )
        with self.database.read() as db:
            row = db.execute(query, (run_id,)).fetchone()
        return row[0] if row else None

    def last(self, run_ids: Sequence[str], names: Sequence[str] = LOSSES) -> dict[str, Summary]:
        """Return run id -> last point of the first of `names` that the run has; fast for long curves too."""
        runs_query = (  # one query for the runs that have such a metric: in a long history most have none
            "SELECT DISTINCT a.run_id FROM json_each(?) AS wanted JOIN attempts a ON a.run_id = wanted.value WHERE EXISTS"
            f" (SELECT 1 FROM curves c WHERE c.attempt_id = a.attempt_id AND c.name IN ({placeholders(names)}))"
        )
        query = (
            "SELECT c.name, c.last_value, c.last_step, c.last_at, c.rank FROM attempts a JOIN curves c USING (attempt_id)"
            f" WHERE a.run_id = ? AND c.name = ? AND {_LOWEST}"
            " ORDER BY a.number DESC, c.node DESC, c.block DESC LIMIT 1"
        )
        last_points = {}
        with self.database.read() as db:
            for (run_id,) in db.execute(runs_query, (json.dumps(list(run_ids)), *names)).fetchall():
                for name in names:
                    if row := db.execute(query, (run_id, name)).fetchone():
                        value = to_float(row[1])
                        last_points[run_id] = Summary(name, 1, value, value, value, value, *row[2:])
                        break
        return last_points

    def owners(self, run_id: str, rank: int | None = 0) -> list[tuple[int, str, int]]:
        """Return attempt, name and rank of each curve of a rank, of all ranks for None."""
        query = (
            "SELECT DISTINCT a.number, c.name, c.rank FROM attempts a JOIN curves c USING (attempt_id)"
            f" WHERE a.run_id = ? AND {of_rank(rank)}"
        )
        with self.database.read() as db:
            return [(attempt, name, of) for attempt, name, of in db.execute(query, (run_id,))]

    def ranks(self, run_id: str, name: str | None = None) -> list[int]:
        """Return the ranks that have logged a metric, or any."""
        query = "SELECT DISTINCT c.rank FROM attempts a JOIN curves c USING (attempt_id) WHERE a.run_id = ?"
        with self.database.read() as db:
            rows = db.execute(f"{query} AND c.name = ?" if name else query, (run_id, name) if name else (run_id,))
            return sorted(row[0] for row in rows)

    def points(self, run_id: str, name: str, most: int = MOST, rank: int = 0) -> list[Point]:
        """Return a curve in at most `most` points (a few more where a new attempt begins), each with its lowest and
        highest value. The first point has the step of the curve's first value, every other one that of its last."""
        blocks = self._blocks(run_id, name, rank)
        lost_from = self._lost_from(run_id, name, rank)
        count = sum(block.points for block in blocks)
        if count <= 2 * most or len(blocks) <= most // 8:  # blocks alone would be too coarse
            all_points = self._single_points(blocks, name, lost_from)
        else:
            all_points = self._block_points(blocks, name, lost_from)
        points = list(downsample(all_points, most))
        if len(points) > 1 and points[0].points > 1:
            points[0] = replace(points[0], step=blocks[0].first_step)
        return points

    def tail(self, run_id: str, name: str, most: int) -> list[float]:
        """Return the end of a curve in about `most` values, the oldest first. A longer curve is averaged over neighbours,
        a much longer one over blocks."""
        query = f"{_BLOCKS} AND {_LOWEST} ORDER BY a.number DESC, c.node DESC, c.block DESC LIMIT ?"
        with self.database.read() as db:
            blocks = [Block(*row) for row in db.execute(query, (run_id, name, most))][::-1]
        if len(blocks) < most // 2 or sum(block.points for block in blocks) <= 4 * most:
            points: Iterable[Point] = downsample(self._single_points(blocks, name, {}), most)
        else:
            points = (block.as_point() for block in blocks)
        return [point.value for point in points if math.isfinite(point.value)][-most:]

    def _blocks(self, run_id: str, name: str, rank: int) -> list[Block]:
        query = f"{_BLOCKS} AND {of_rank(rank)} ORDER BY a.number, c.node, c.block"
        with self.database.read() as db:
            return [Block(*row) for row in db.execute(query, (run_id, name))]

    def _lost_from(self, run_id: str, name: str, rank: int) -> dict[int, int]:
        """Return attempt -> the step at which a newer attempt resumed: an older one's points from there on are lost.

        An attempt resumed at its first point of the metric. An evaluation comes later than training does: its points are
        lost from the first point of the newer attempt's training loss on.
        """
        names = (name, *LOSSES) if is_evaluation(name) else (name,)
        query = (  # SQLite takes first_step from the row with the lowest block
            "SELECT a.number, min(c.block), c.first_step FROM attempts a JOIN curves c USING (attempt_id)"
            f" WHERE a.run_id = ? AND c.name IN ({', '.join('?' for _ in names)}) AND {of_rank(rank)}"
            " GROUP BY a.number, c.name"
        )
        first: dict[int, int] = {}
        with self.database.read() as db:
            if db.execute("SELECT max(number) FROM attempts WHERE run_id = ?", (run_id,)).fetchone()[0] == 1:
                return {}
            for attempt, _, step in db.execute(query, (run_id, *names)):
                first[attempt] = min(step, first.get(attempt, step))
        lost_from: dict[int, int] = {}
        resumed: int | None = None
        for attempt in sorted(first, reverse=True):
            if resumed is not None:
                lost_from[attempt] = resumed
            resumed = first[attempt] if resumed is None else min(resumed, first[attempt])
        return lost_from

    def _block_points(self, blocks: Sequence[Block], name: str, lost_from: Mapping[int, int]) -> Iterator[Point]:
        """Yield a point for each block; a block in which a lost part begins is read point by point."""
        for block in blocks:
            lost = block.is_lost(lost_from)
            if lost is None:
                yield from self._single_points([block], name, lost_from)
            else:
                yield block.as_point(lost=lost)

    def _single_points(self, blocks: Sequence[Block], name: str, lost_from: Mapping[int, int]) -> Iterator[Point]:
        """Yield the single points of some blocks."""
        query = (
            "SELECT step, value, at, epoch FROM metrics WHERE attempt_id = ? AND node = ? AND seq >= ? AND seq < ?"
            " AND name = ? AND rank = ? ORDER BY seq"
        )
        with self.database.read() as db:
            for block in blocks:
                first, resumed = block.block * BLOCK, lost_from.get(block.attempt)
                where = (block.attempt_id, block.node, first, first + BLOCK, name, block.rank)
                for step, value, at, epoch in db.execute(query, where):
                    number = to_float(value)
                    finite = number if math.isfinite(number) else math.nan
                    lost = resumed is not None and step >= resumed
                    yield Point(block.attempt, step, finite, finite, finite, 1, at, epoch, lost)


def _extreme(choose: Callable[[list[float]], float], first: float | None, second: float | None) -> float:
    """Return min or max (`choose`) of two values, either of which may be missing; NaN where both are."""
    numbers = [value for value in (first, second) if value is not None and not math.isnan(value)]
    return choose(numbers) if numbers else math.nan
