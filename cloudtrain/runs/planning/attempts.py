"""An attempt's backend and bundle, the plan of the next attempt, and the pause before the next look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend
from cloudtrain.backends.checkpoints import FOLDERS
from cloudtrain.backends.plan import ATTACHED, Fact, Plan, say
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError
from cloudtrain.runs.planning import cap

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

FIRST_POLL_S = 0.005  # a short job's end is noticed at once


def backend_of(plan: Plan, home: Path, handle: str | None = None, clock: Clock = SYSTEM) -> Backend:
    """Return the backend of a plan, over the options that the plan was made with; of an attached run what reads it."""
    if handle is not None and handle.startswith(ATTACHED):
        return registry.create_attached(home, clock)
    return registry.create_for(plan, home, clock)


def replan(
    plan: Plan,
    number: int,
    backend: Backend,
    home: Path,
    *,
    earlier: Sequence[AttemptRecord] = (),
    job: Job | None = None,
) -> tuple[Plan, Bundle]:
    """Return the plan of a run's next attempt over the bundle of an earlier one.

    Args:
        earlier: the run's attempts that have used a part of its cap.
        job: instead of the one in `plan`, whose candidates then no longer count.

    Raises:
        BackendError: the bundle is gone.
        CapReached: too little is left of the run's cap.
    """
    bundle = stored_bundle(plan, home)
    rows = () if job else plan.candidates
    made = cap.plan_attempt(backend, job or plan.stored_job, bundle, plan.run_id, number, earlier, home, rows)
    # What a check of the source has left out of the plan before stays out: a script that uses no GPU needs no word of them.
    notes = tuple(note for note in made.notes if note in plan.notes or not say([note], Fact.NO_GPUS))
    return replace(made, target=plan.target, candidates=rows, policies=plan.policies, notes=notes), bundle


def stored_bundle(plan: Plan, home: Path) -> Bundle:
    """Return the bundle that a plan was made with; raises BackendError when it is gone."""
    from cloudtrain.source.bundle import Bundle  # needed for another attempt only

    bundle = Bundle.stored(home / "bundles", str(plan.bundle["sha256"]))
    if bundle is None:
        raise BackendError(
            f"the packaged source of {plan.run_id} was deleted",
            f"cloudtrain rerun {plan.run_id} --source DIR starts a new run with the source in DIR",
        )
    return bundle


def reaches(new: Plan, old: Plan) -> bool:
    """Return whether an attempt reads the checkpoints of an older one, as far as the plans say it.

    A folder has the same path on both: whether it is the same folder is seen on the node (checkpoint.required).
    """
    if output(old):
        return place(old) == place(new)
    same = ("options", "output")
    return old.backend == new.backend and all(old.job.get(key) == new.job.get(key) for key in same)


def place(plan: Plan) -> str:
    """Return where a run's checkpoints are, for a person."""
    return f"{output(plan)}/{plan.run_id}" if output(plan) else f"the run's folder on {plan.target or plan.backend}"


def output(plan: Plan) -> str:
    """Return the output below which a run's checkpoints are, "" for a folder that only its backend knows."""
    copied = (plan.request.get("CheckpointConfig") or {}).get("S3Uri")  # by SageMaker itself
    uri = str(copied or plan.manifest.get("output") or plan.job.get("output") or "").removeprefix("file://")
    return uri.removesuffix(f"/{plan.manifest['run_id']}/checkpoints").rstrip("/")


def uploads(plan: Plan) -> bool:
    """Return whether an attempt's launcher uploads the run's folders to a store."""
    return "://" in str(plan.manifest.get("output") or "").removeprefix("file://")


def carry_checkpoints(checkpoint: Mapping[str, Any], backend: str, old: Plan, saved: bool) -> dict[str, Any]:
    """Return the key `checkpoint` of an attempt that finds the checkpoints of an older one, in their folder.

    Where one was saved it must find it. The end of an attempt may leave one that it did not report.
    """
    own, there = (FOLDERS[registry.traits(name).packs] for name in (backend, old.backend))
    folder = old.manifest["checkpoint"].get("folder") or there
    required = saved or checkpoint["required"]
    return {**checkpoint, "required": required, "folder": folder if folder != own else None}


def pause(age_s: float, longest_s: float) -> float:
    """Return how long to sleep between two looks at what is `age_s` seconds old: a fiftieth of that, within bounds."""
    return min(max(FIRST_POLL_S, age_s / 50), longest_s)
