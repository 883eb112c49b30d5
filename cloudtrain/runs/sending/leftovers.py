"""Which attempt of a run may have left files on machines, without which the next one would begin anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.job.units import now, unix_time
from cloudtrain.runs.sending import retry

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

UNSEEN_S = 60.0  # for so long, besides the time that the machine did not answer, an attempt may have run unseen


def plan_after(store: Store, backend: Backend, plan: Plan) -> Plan:
    """Return the plan of a run's next attempt, which goes to any machine where no earlier one has left files."""
    if (lost_after_s := backend.lost_after_s) is None:
        return plan
    earlier = [
        attempt
        for attempt in store.attempts(plan.run_id)
        if attempt.number < plan.attempt and attempt.handle is not None and attempt.plan.backend == plan.backend
    ]
    saved = bool(retry.saved(store, plan.run_id)) or bool(plan.job["checkpoint"]["required"])
    left = saved or any(_may_have_left(store, attempt, lost_after_s) for attempt in earlier)
    return backend.plan_after(plan, earlier[-1].number if left and earlier else 0)


def _may_have_left(store: Store, attempt: AttemptRecord, lost_after_s: float) -> bool:
    """Return whether an attempt that reported no checkpoint has files in the run's folders, or ran on without being seen."""
    seen_at = attempt.created_at
    for node in range(int(attempt.plan.manifest["nodes"])):
        if (usage := store.latest(attempt.attempt_id, node, "usage")) is not None:
            if usage.data.get("files") is not False:  # an older launcher does not report it
                return True
            seen_at = max(seen_at, usage.at)
    return unix_time(attempt.status.ended_at or now(store.clock)) - unix_time(seen_at) > lost_after_s + UNSEEN_S
