"""What an attached run resumes with: the job and the source that its output has.

Both were written elsewhere. They go to a platform when a person resumes the run, and at no other time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest
from cloudtrain.job.job import Job
from cloudtrain.source import received

if TYPE_CHECKING:
    from cloudtrain.backends.plan import Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store
    from cloudtrain.source.bundle import Bundle

LIVE = "cancel it on the machine that submitted it; a run without output for an hour is LOST and can be resumed here"


class Brought(NamedTuple):
    """The job of an attached run, with the output that it was attached from, and its source."""

    job: Mapping[str, Any]
    bundle: Bundle


def bring(store: Store, newest: AttemptRecord, uri: str) -> Brought:
    """Return what the next attempt of an attached run is made of; blocking. Raises BadRequest, BackendError."""
    plan, about = newest.plan, newest.plan.bundle
    if not plan.manifest.get("output") or plan.job.keys() == {"name"}:
        raise BadRequest(
            f"{plan.run_id} cannot be resumed from {uri}: its record has no job, or it is a copy",
            "attach <output>/<run id> itself",
        )
    data = registry.create_attached(store.home, store.clock).source(uri, str(about["source_sha256"]))
    if data is None:
        raise BadRequest(f"{uri} has no source of {plan.run_id}", "resume it from the machine that submitted it")
    try:
        job = Job.from_dict(plan.job)
        bundle = received.package(data, about, store.home / "bundles", trainer=job.runs_trainer, **job.exceptions)
    except BadRequest as error:
        raise BadRequest(f"the source at {uri} cannot be used: {error.message}", error.hint) from None
    return Brought({**plan.job, "output": plan.manifest["output"]}, bundle)


def describe(plan: Plan, uri: str) -> str:
    """Return what a person who resumes an attached run is asked about."""
    names = ", ".join(sorted(plan.manifest.get("secrets") or {}))
    secrets = f", and gets the secrets {names}" if names else ""
    return (
        f"{plan.run_id} was submitted from another machine: its job and source from {uri} run on {plan.target}{secrets}"
    )
