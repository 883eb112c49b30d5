"""Results of evaluations in the curves of the run that was evaluated: one point for a metric and a step, the newest.

They are points of the run's newest attempt with sequence numbers between those of its log and of trackers' files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloudtrain.events import Row
from cloudtrain.history.migrations import BLOCK
from cloudtrain.history.points import add_points

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

FIRST, END = 1 << 61, 1 << 62  # sequence numbers: history/event_files.py has those from END on
PREFIX = "eval/"  # of the names
LABEL = "evaluates"  # of a run that evaluates another one: that one's id


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


def store_results(store: Store, attempt: AttemptRecord) -> None:
    """Add what an attempt has measured to the curves of the run that it evaluates; again it changes nothing."""
    run_id = (attempt.plan.job.get("labels") or {}).get(LABEL)
    if not run_id or store.get(run_id) is None:  # it was removed meanwhile
        return
    results = []
    for event in store.events(attempt.run_id, "evaluation"):
        values, step = event.data.get("values"), event.data.get("step")
        if event.attempt != attempt.attempt_id or not isinstance(values, dict):
            continue
        if event.data.get("final") or not isinstance(step, int):
            step = last_step(store, run_id)
        for name, value in values.items():
            number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
            if str(name).startswith(PREFIX):
                results.append((step, str(name), number, event.at))
    if results:
        write_results(store, run_id, results)


def last_step(store: Store, run_id: str) -> int:
    """Return the last step of a run's own metrics, 0 where it has none."""
    steps = [
        step
        for metrics in store.curves.last_steps(run_id).values()
        for (_, name), step in metrics.items()
        if not name.startswith(PREFIX)
    ]
    return max(steps, default=0)
