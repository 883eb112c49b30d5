"""Results of evaluations in the curves of the run that was evaluated: one point for a metric and a step, the newest.

They are points of the run's newest attempt with sequence numbers between those of its log and of trackers' files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloudtrain.events import Row
from cloudtrain.history.migrations import BLOCK
from cloudtrain.history.points import add_points

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

FIRST, END = 1 << 61, 1 << 62  # sequence numbers: history/event_files.py has those from END on
PREFIX = "eval/"  # of the names


def write_results(store: Store, run_id: str, results: Sequence[tuple[int, str, float, str]]) -> None:
    """Add (step, name, value, time) to a run's curves, in one transaction; a point of the same name and step is replaced."""
    attempt_id = store.attempts(run_id)[-1].attempt_id
    ours = "attempt_id IN (SELECT attempt_id FROM attempts WHERE run_id = ?) AND name = ?"
    with store.database.translated_errors(), store.database.write() as db:
        for name in sorted({name for _, name, _, _ in results}):
            query = f"SELECT step, value, at FROM metrics WHERE {ours} AND seq >= ? AND seq < ?"
            points = {step: (value, at) for step, value, at in db.execute(query, (run_id, name, FIRST, END))}
            points |= {step: (value, at) for step, other, value, at in results if other == name}
            db.execute(f"DELETE FROM metrics WHERE {ours} AND seq >= ? AND seq < ?", (run_id, name, FIRST, END))
            blocks = (run_id, name, FIRST // BLOCK, END // BLOCK)
            db.execute(f"DELETE FROM curves WHERE {ours} AND block >= ? AND block < ?", blocks)
            db.execute(
                "DELETE FROM run_metrics WHERE run_id = ? AND name = ? AND seq >= ? AND seq < ?",
                (run_id, name, FIRST, END),
            )
            rows = [
                Row(0, FIRST + place, at, step, name, value)
                for place, (step, (value, at)) in enumerate(sorted(points.items()))
            ]
            add_points(db, attempt_id, rows)
