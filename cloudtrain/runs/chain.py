"""Hold a run until the runs in its key `after` have SUCCEEDED, then send it; skip it where one of them has not.

A held run has a stored intent without an owner, and nothing of it was sent. Who sends it becomes the owner and stores the
final plan in one transaction: only one process does. From then on it is as every submission whose sender may die.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.errors import BadJob, CloudtrainError, Problem, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cloudtrain.backends.plan import Plan
    from cloudtrain.history.records import AttemptRecord, RunRecord
    from cloudtrain.history.store import Store
    from cloudtrain.job.job import Job

HELD = ""  # the owner of an attempt that no process sends


def resolve(job: Job, home: Path) -> Job:
    """Return a job whose `after` has whole ids; raises BadJob for a run that is not there or has not succeeded."""
    if not job.after:
        return job
    from cloudtrain.history.store import Store

    store, ids, problems = Store(home), [], []
    for at, text in enumerate(job.after):
        try:
            run = store.find(text)
        except CloudtrainError as error:
            problems.append(Problem(error.message, f"after[{at}]", error.hint))
            continue
        ids.append(run.run_id)
        if run.status.state.final and run.status.state is not State.SUCCEEDED:
            message = f"{run.run_id} has ended {run.status.state}: this job would never start"
            problems.append(Problem(message, f"after[{at}]", f"cloudtrain resume {run.run_id} starts its next attempt"))
        elif run.attached and not run.status.state.final:
            message = f"{run.run_id} was submitted from another machine, so its end is unknown on this machine"
            problems.append(Problem(message, f"after[{at}]", f"cloudtrain wait {run.run_id} waits for it"))
    if problems:
        raise BadJob(job.located(problems))
    return job.model_copy(update={"after": list(dict.fromkeys(ids))})


def waits_for(store: Store, plan: Plan) -> str:
    """Return the reason for which a run is held, "" where all runs before it have succeeded."""
    states = {
        run_id: run.status.state if (run := store.get(run_id)) else None for run_id in plan.job.get("after") or ()
    }
    open_runs = [f"{run_id} ({state or 'removed'})" for run_id, state in states.items() if state is not State.SUCCEEDED]
    return f"waits for {', '.join(open_runs)}" if open_runs else ""


def waiting(store: Store, run_ids: Sequence[str]) -> list[str]:
    """Return the live runs that wait for some runs, and those that wait for them in turn."""
    known = dict.fromkeys(run_ids, False)
    queue = list(known)
    for run_id in queue:
        for record in store.dependents(run_id):
            if record.run_id not in known and not record.status.state.final:
                known[record.run_id] = True
                queue.append(record.run_id)
    return [run_id for run_id, waits in known.items() if waits]


def is_held(attempt: AttemptRecord) -> bool:
    """Return whether nothing of an attempt was sent, because it waits for other runs."""
    if not attempt.plan.job.get("after") or attempt.number > 1:
        return False
    unsent = attempt.handle is None and not attempt.status.state.final
    return unsent and attempt.owner == HELD and attempt.unanswered_since is None


def advance(store: Store, run: RunRecord, attempt: AttemptRecord, *, may_send: bool) -> tuple[bool, bool]:
    """Send, skip or keep a held run; return whether it is due for a process that may send, and whether it moved on.

    Blocking where it sends. Raises the platform's error where it is not known whether it has the attempt.
    """
    if run.cancel_requested:
        return False, _end(store, attempt, Status(State.CANCELLED, None, "cancelled before it started"))
    if skipped := _why_skipped(store, attempt.plan):
        return False, _end(store, attempt, Status(State.CANCELLED, None, f"skipped: {skipped}"))
    if reason := waits_for(store, attempt.plan):
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
    if not store.change_owner(attempt.attempt_id, old=HELD, new=Process.here()):
        return False
    status = Status(status.state, None, status.reason, ended_at=now())
    store.record(attempt.attempt_id, status=status)
    store.set_status(attempt.run_id, status)
    return True


def _send(store: Store, attempt: AttemptRecord) -> bool:
    from cloudtrain.runs import attempts, outcomes, policies, send

    try:
        plan = _final_plan(store, attempt.plan)
        backend = attempts.backend_of(plan, store.home)
        plan = policies.check_stored(plan, backend, store.home)
        send.preflight(plan, backend)
    except Unreachable:
        raise
    except CloudtrainError as error:
        return _end(store, attempt, Status(State.FAILED, None, f"not sent: {error.message}"))
    outcome = send.send_attempt(store, plan, backend, None, lambda: store.begin_held(plan, Process.here()))
    if isinstance(outcome, outcomes.Unknown):
        raise outcome.error
    return outcome is not None


def _final_plan(store: Store, plan: Plan) -> Plan:
    """Return the plan of a held run, with the places and digests of what the runs before it have left."""
    inputs = (plan.job.get("inputs") or {}).values()
    if not any("run" in item and "sha256" not in item for item in inputs):
        return plan
    from dataclasses import replace

    from cloudtrain.job.job import Job
    from cloudtrain.runs import attempts, run_inputs

    options = (plan.job.get("options") or {}).get(plan.backend) or {}
    job = run_inputs.locate(Job.from_dict(plan.job), plan.backend, options, store.home)
    made, _ = attempts.replan(plan, 1, attempts.backend_of(plan, store.home), store.home, job=job)
    return replace(made, notes=plan.notes)
