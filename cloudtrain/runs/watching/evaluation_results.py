"""Store the results of an evaluation, a run of its own, as metrics of the run that it evaluated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cloudtrain.history.evaluations import PREFIX, write_results

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

LABEL = "evaluates"  # of a run that evaluates another one: that one's id


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
