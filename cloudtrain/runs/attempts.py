"""An attempt's backend, bundle and secrets, the plan of the next attempt, and the pause before the next look."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.api import ATTACHED, Backend, Plan
from cloudtrain.errors import BackendError, BadRequest

if TYPE_CHECKING:
    from cloudtrain.source.bundle import Bundle

FIRST_POLL_S = 0.005  # a short job's end is noticed at once


def backend_of(plan: Plan, home: Path, handle: str | None = None) -> Backend:
    """Return the backend of a plan, over the options that the plan was made with; of an attached run what reads it."""
    if handle is not None and handle.startswith(ATTACHED):
        return registry.create_attached(home)
    options: Mapping[str, Any] = (plan.job.get("options") or {}).get(plan.backend) or {}
    return registry.create(plan.backend, options, home)


def replan(plan: Plan, number: int, backend: Backend, home: Path) -> tuple[Plan, Bundle]:
    """Return the plan of a run's next attempt over the bundle of an earlier one; raises BackendError when that is gone."""
    from cloudtrain.job.job import Job

    bundle = stored_bundle(plan, home)
    job = Job.from_dict(plan.job)
    return replace(backend.plan(job, bundle, plan.run_id, number), target=plan.target), bundle


def stored_bundle(plan: Plan, home: Path) -> Bundle:
    """Return the bundle that a plan was made with; raises BackendError when it is gone."""
    from cloudtrain.source.bundle import Bundle  # needed for another attempt only

    bundle = Bundle.stored(home / "bundles", str(plan.bundle["sha256"]))
    if bundle is None:
        raise BackendError(f"the bundle of {plan.run_id} is gone", "cloudtrain rerun --source DIR starts a new run")
    return bundle


def unset_secrets(plan: Plan) -> str:
    """Return which secrets have no source but environment variables that this process does not have; "" for none."""
    secrets: Mapping[str, list[str]] = plan.manifest.get("secrets") or {}
    return "; ".join(
        f"secret {name}: {' or '.join(sources)} is not set"
        for name, sources in sorted(secrets.items())
        if all(source.startswith("env:") and source[4:] not in os.environ for source in sources)
    )


def check_secrets(plan: Plan) -> None:
    """Raise BadRequest where this process does not have what the job's secrets come from."""
    if unset := unset_secrets(plan):
        raise BadRequest(unset, "export it, or use another source")


def secret_sources(plan: Plan) -> set[str]:
    """Return the variables of the submitting process from which secrets of a job come."""
    secrets: Mapping[str, list[str]] = plan.manifest.get("secrets") or {}
    return {source[4:] for secret in secrets.values() for source in secret if source.startswith("env:")}


def secret_names(plan: Plan) -> set[str]:
    """Return the variables that hold, or are to hold, secrets of a job."""
    return secret_sources(plan) | set(plan.manifest.get("secrets") or {})


def pause(age_s: float, longest_s: float) -> float:
    """Return how long to sleep between two looks at what is `age_s` seconds old: a fiftieth of that, within bounds."""
    return min(max(FIRST_POLL_S, age_s / 50), longest_s)
