"""The runs that a run waits for, its key `after`, and those that wait for a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.errors import BadJob, CloudtrainError, Problem
from cloudtrain.events import State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cloudtrain.backends.plan import Plan
    from cloudtrain.history.records import AttemptRecord
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
