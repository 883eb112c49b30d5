"""Send a held run when the runs before it have SUCCEEDED; skip it where one of them has not.

A held run has a stored intent without an owner, and nothing of it was sent. Who sends it becomes the owner and stores the
final plan in one transaction: only one process does. From then on it is as every submission whose sender may die.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process
from cloudtrain.policy import apply
from cloudtrain.runs.planning import attempts, upstream
from cloudtrain.runs.sending import outcomes, send

if TYPE_CHECKING:
    from cloudtrain.backends.plan import Plan
    from cloudtrain.history.records import AttemptRecord, RunRecord
    from cloudtrain.history.store import Store


def advance(store: Store, run: RunRecord, attempt: AttemptRecord, *, may_send: bool) -> tuple[bool, bool]:
    """Send, skip or keep a held run; return whether it is due for a process that may send, and whether it moved on.

    Blocking where it sends. Raises the platform's error where it is not known whether it has the attempt.
    """
    if run.cancel_requested:
        return False, _end(store, attempt, Status(State.CANCELLED, None, "cancelled before it started"))
    if skipped := _why_skipped(store, attempt.plan):
        return False, _end(store, attempt, Status(State.CANCELLED, None, f"skipped: {skipped}"))
    if reason := upstream.waits_for(store, attempt.plan):
        if reason != run.status.reason:
            store.set_status(run.run_id, Status(State.QUEUED, None, reason))
        for run_id in attempt.plan.job["after"] if not may_send else ():
            if not store.watched(run_id):  # its watcher was killed: the one of this run takes it over
                store.offer(run_id)
        return False, False
    return (False, _send(store, attempt)) if may_send else (True, False)


def _why_skipped(store: Store, plan: Plan) -> str:
    for run_id in plan.job["after"]:
        run = store.get(run_id)
        if run is None:
            return f"{run_id} was removed"
        if run.status.state is State.CANCELLED:
            return f"{run_id} was cancelled"
        if run.status.failed:
            return f"{run_id} failed"
    return ""


def _end(store: Store, attempt: AttemptRecord, status: Status) -> bool:
    """End a held run; False where another process has just begun to send it."""
    if not store.change_owner(attempt.attempt_id, old=upstream.HELD, new=Process.here()):
        return False
    outcomes.end_attempt(store, attempt.plan, replace(status, ended_at=now(store.clock)))
    return True


def _send(store: Store, attempt: AttemptRecord) -> bool:
    try:
        plan = _final_plan(store, attempt.plan)
        backend = attempts.backend_of(plan, store.home, clock=store.clock)
        plan = apply.check_stored(plan, backend, store.home)
        send.preflight(plan, backend)
    except Unreachable:
        raise
    except CloudtrainError as error:
        return _end(store, attempt, Status(State.FAILED, None, f"not sent: {error.message}"))
    outcome = send.send_attempt(store, plan, backend, None, lambda: store.begin_held(plan, outcomes.background_owner()))
    if isinstance(outcome, outcomes.Unknown):
        raise outcome.error
    return outcome is not None


def _final_plan(store: Store, plan: Plan) -> Plan:
    """Return the plan of a held run, with the places and digests of what the runs before it have left."""
    inputs = (plan.job.get("inputs") or {}).values()
    if not any("run" in item and "sha256" not in item for item in inputs):
        return plan
    options = (plan.job.get("options") or {}).get(plan.backend) or {}
    job = upstream.locate(plan.stored_job, plan.backend, options, store.home)
    made, _ = attempts.replan(plan, 1, attempts.backend_of(plan, store.home, clock=store.clock), store.home, job=job)
    return replace(made, notes=plan.notes)
