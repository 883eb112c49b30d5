"""Adds points of metrics: each one, its curve's block (`curves`), and the last value and extremes of a run (`run_metrics`)."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Iterable
from typing import Any

from cloudtrain.events import Row
from cloudtrain.history.migrations import BLOCK

_POINT = (
    "INSERT OR IGNORE INTO metrics (attempt_id, node, seq, at, step, name, value, rank, epoch)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def _merged(name: str, choose: str, mine: str) -> str:
    """Return SQL for the lower or higher one of two values, each of which may be missing."""
    return f"coalesce({choose}(excluded.{name}, {mine}.{name}), excluded.{name}, {mine}.{name})"


_LATER = "excluded.last_seq >= curves.last_seq"
_BLOCK = (
    "INSERT INTO curves (attempt_id, name, rank, node, block, points, finite, total, lowest, highest, first_value, first_step,"
    " last_value, last_step, last_seq, last_at, last_epoch) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (attempt_id, name, rank, node, block) DO UPDATE SET points = points + excluded.points,"
    " finite = finite + excluded.finite, total = coalesce(total + excluded.total, total),"  # inf - inf is NULL
    f" lowest = {_merged('lowest', 'min', 'curves')}, highest = {_merged('highest', 'max', 'curves')}, "
    + ", ".join(
        f"{name} = CASE WHEN {_LATER} THEN excluded.{name} ELSE curves.{name} END"
        for name in ("last_value", "last_step", "last_at", "last_epoch", "last_seq")
    )
)

_LOWER = "excluded.rank < run_metrics.rank"  # a metric that rank 0 has not logged is that of the lowest rank that has
_NEWER = f"({_LOWER} OR (excluded.attempt, excluded.seq) >= (run_metrics.attempt, run_metrics.seq))"
_OF_RUN = (
    "INSERT INTO run_metrics (name, run_id, rank, attempt, seq, last, lowest, highest, step)"
    " SELECT ?1, run_id, ?2, number, ?3, ?4, ?5, ?6, ?7 FROM attempts WHERE attempt_id = ?8"
    " ON CONFLICT (name, run_id) DO UPDATE SET rank = excluded.rank, "
    + ", ".join(
        f"{name} = CASE WHEN {_NEWER} THEN excluded.{name} ELSE run_metrics.{name} END"
        for name in ("attempt", "seq", "last", "step")
    )
    + ", "
    + ", ".join(
        f"{name} = CASE WHEN {_LOWER} THEN excluded.{name} ELSE {_merged(name, choose, 'run_metrics')} END"
        for name, choose in (("lowest", "min"), ("highest", "max"))
    )
    + " WHERE excluded.rank <= run_metrics.rank"
)


def add_points(db: sqlite3.Connection, attempt_id: str, points: Collection[Row]) -> None:
    """Add points of an attempt, within a transaction; those that are there already stay as they are."""
    added = db.executemany(_POINT, [(attempt_id, *point) for point in points]).rowcount if points else 0
    blocks = _summarize(points)
    db.executemany(
        _OF_RUN,
        [
            (key[0], key[1], block[9], block[7], block[3], block[4], block[8], attempt_id)
            for key, block in blocks.items()
        ],
    )
    if added == len(points):
        db.executemany(_BLOCK, [(attempt_id, *key, *block) for key, block in blocks.items()])
    else:
        for node, number in sorted({key[2:] for key in blocks}):
            _fill_block(db, attempt_id, node, number)


def fill_curves(db: sqlite3.Connection, attempt_id: str) -> None:
    """Make the blocks of all points of an attempt, within a transaction."""
    query = f"SELECT DISTINCT node, seq / {BLOCK} FROM metrics WHERE attempt_id = ?"
    for node, number in db.execute(query, (attempt_id,)).fetchall():
        _fill_block(db, attempt_id, node, number)


def _fill_block(db: sqlite3.Connection, attempt_id: str, node: int, number: int) -> None:
    """Make the blocks of some log lines of a node from their points."""
    rows = db.execute(
        "SELECT node, seq, at, step, name, value, rank, epoch FROM metrics WHERE attempt_id = ? AND node = ?"
        " AND seq >= ? AND seq < ?",
        (attempt_id, node, number * BLOCK, (number + 1) * BLOCK),
    )
    blocks = _summarize(map(Row._make, rows))
    keys = [(attempt_id, *key) for key in blocks]
    db.executemany("DELETE FROM curves WHERE (attempt_id, name, rank, node, block) = (?, ?, ?, ?, ?)", keys)
    db.executemany(_BLOCK, [(attempt_id, *key, *block) for key, block in blocks.items()])


def _summarize(points: Iterable[Row]) -> dict[tuple[str, int, int, int], list[Any]]:
    """Return name, rank, node and number of each block -> its other columns, in the order of _BLOCK.

    NaN and infinity count as points, but not in a block's total, lowest and highest.
    """
    blocks: dict[tuple[str, int, int, int], list[Any]] = {}
    for node, seq, at, step, name, value, rank, epoch in points:
        key = name, rank, node, seq // BLOCK
        block = blocks.get(key)
        if block is None:
            blocks[key] = block = [0, 0, 0.0, None, None, value, step, value, step, seq, at, epoch]
        elif seq >= block[9]:
            block[7:] = value, step, seq, at, epoch
        block[0] += 1
        if value is not None and math.isfinite(value):
            block[1] += 1
            block[2] += value
            if block[3] is None or value < block[3]:
                block[3] = value
            if block[4] is None or value > block[4]:
                block[4] = value
    return blocks
