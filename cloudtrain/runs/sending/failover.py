"""Move a run to its next candidate where one has no machines; an attempt is gone before the next one is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.events import State, Status
from cloudtrain.job.units import seconds_since
from cloudtrain.runs.planning import attempts, candidates
from cloudtrain.runs.sending import retry

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

_PENDING = (State.QUEUED, State.STARTING)
_GONE = (State.CANCELLED, State.TIMED_OUT, State.PREEMPTED, State.LOST)


def has_candidates(plan: Plan) -> bool:
    """Return whether a run may go elsewhere."""
    return len(candidates.bases(plan)) > 1


def next_plans(store: Store, plan: Plan, status: Status) -> tuple[list[Plan], str]:
    """Return what the next attempt may be planned from, in the order to try it, and why there is none ("" otherwise).

    After insufficient capacity these are the other candidates and then the same one; where spot machines were lost twice
    without a new checkpoint the later candidates; else the same one. With checkpoints only candidates that reach them.
    """
    bases = candidates.bases(plan)
    at = next((number for number, base in enumerate(bases) if candidates.is_of(base, plan)), 0)
    here, later, before = [plan], bases[at + 1 :], bases[:at]
    stuck = "" if status.event == "capacity" else retry.without_progress(store, plan.run_id, plan.attempt)
    if status.event == "capacity":
        found = [*later, *before, *here]
    else:
        found = later if stuck else here
    written = retry.saved(store, plan.run_id)
    saved = [attempt.plan for attempt in store.attempts(plan.run_id) if attempt.attempt_id in written]
    old = saved[-1] if saved else plan
    found = [
        base if base is plan else _carried(base, old, bool(saved))
        for base in found
        if not saved or attempts.reaches(base, old)
    ]
    return (
        found,
        "" if found else stuck or "no new attempt: none of the job's other targets can read the run's checkpoints",
    )


def _carried(base: Plan, old: Plan, saved: bool) -> Plan:
    """Return a candidate whose node finds the checkpoints of `old`; where one was saved it refuses to begin anew."""
    checkpoint = attempts.carry_checkpoints(base.job["checkpoint"], base.backend, old, saved)
    return replace(base, job={**base.job, "checkpoint": checkpoint})


def why_withdrawn(store: Store, attempt: AttemptRecord, status: Status) -> str:
    """Return why a request for machines is to be withdrawn for the next candidate; "" where it may go on.

    The decision is stored as the event `capacity` of an attempt that has not ended: who watches next goes on with it.
    """
    if not has_candidates(attempt.plan):
        return ""
    if attempt.status.event == "capacity":
        return attempt.status.reason
    from cloudtrain.job.job import Job

    max_wait = Job.from_dict(attempt.plan.job).limits
    pending = status.state in _PENDING and status.started_at is None
    if (
        not pending
        or max_wait.max_wait_s is None
        or seconds_since(attempt.created_at, store.clock) <= max_wait.max_wait_s
    ):
        return ""
    refused = Status(State.FAILED, event="capacity")
    reason = f"cancelled: no machines within {max_wait.max_wait} (limits.max_wait)"
    return reason if retry.allowed(store, attempt.plan, refused) else ""


def ended(attempt: AttemptRecord, status: Status, withdrawn: str) -> Status:
    """Return the status of an attempt as its run sees it: one that never got machines is the event `capacity`."""
    if withdrawn and status.state in _GONE:
        began = State.PREEMPTED if status.started_at or attempt.status.started_at else State.FAILED
        state = State.LOST if status.state is State.LOST else began  # of what had begun the time counts
        return replace(status, state=state, exit_code=None, reason=withdrawn, event="capacity")
    if withdrawn and not status.state.final:
        return replace(status, reason=withdrawn, event="capacity")
    if status.state is State.TIMED_OUT and not status.started_at and has_candidates(attempt.plan):
        return replace(status, event="capacity")
    return status
