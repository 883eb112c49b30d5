"""Submit a job exactly once, on any backend, and return its run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest
from cloudtrain.runs import policies
from cloudtrain.runs.exactly_once import ExactlyOnce, Submitted
from cloudtrain.runs.keys import identity
from cloudtrain.runs.plan import Resolved
from cloudtrain.runs.run import Run
from cloudtrain.source.bundle import Bundle

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.job.job import Job

__all__ = ["Submitter", "identity", "submit"]


class Submitter(ExactlyOnce):
    """Packages a job, plans it, and submits it exactly once.

    `target` is a backend or a target of cloudtrain.toml, and wins over the job's own; `options` are that backend's and
    win over all others. `home` is where the history lives. With `watch=False` no watcher is
    started: call `cloudtrain watch` (for CI and containers, where a detached process would not survive). `confirm` is
    called with a sentence where a run may cost more than `confirm_above` of cloudtrain.toml, and raises to send nothing.
    `force` sends what does not fit on its GPUs, too.
    """

    def submit(
        self,
        job: Job | Mapping[str, Any] | str | os.PathLike[str],
        *,
        sets: Sequence[str] = (),
        key: str | None = None,
        new: bool = False,
        adopt: bool = False,
        parent: str | None = None,
        after: Sequence[Run | str] = (),
    ) -> Run:
        """Submit a job and return its run; blocks until the platform has answered.

        The intent is stored before anything is sent. When an earlier submit of the same job was interrupted, that run is
        finished and returned instead (`run.adopted`). One that is older than 15 minutes or has failed since needs a
        decision: `adopt` takes it, `new` starts another run. `key` names the run: the same key returns the same run. A key
        whose run ended before anything ran (refused, or cancelled before it started) names a new run.

        `after` names runs: this one is held QUEUED until they have SUCCEEDED, in place of the job's own `after`.

        When the answer is lost, the run is returned QUEUED without a handle, and its watcher finds out what happened.

        Raises:
            BadRequest: the job is wrong, `key` was used for another job, an old interrupted submit is in the way, or a
                budget is spent (OverBudget).
            BackendError: the platform refuses the job; the run is FAILED.
            StoreError: the history cannot be used.
        """
        if after:
            sets = [*sets, f"after={json.dumps([one if isinstance(one, str) else one.run_id for one in after])}"]
        plan, bundle = self.plan_job(job, sets, key)
        if not new and (found := self.adopt_interrupted(plan, key, adopt=adopt)):
            return self._run(found)
        return self.send(plan, bundle, key=key, parent=parent)

    def submit_plan(self, plan: Plan) -> Run:
        """Submit exactly this plan, once; raises BadRequest when the bundle of its digest can no longer be made."""
        if self.store.get(plan.run_id):
            return self._run(self.existing(plan))
        plan = policies.check_stored(plan, registry.create_for(plan, self.home), self.home, Path.cwd())
        digest = str(plan.bundle["sha256"])
        bundle = Bundle.stored(self.home / "bundles", digest)
        if bundle is None:
            from cloudtrain.job.job import Job

            bundle = self.package(Resolved(Job.from_dict(plan.job), plan.target, plan.backend))
            if bundle.sha256 != digest:
                raise BadRequest("the source has changed since the plan was made", "make the plan again")
        return self.send(plan, bundle)

    def send(self, plan: Plan, bundle: Bundle, *, key: str | None = None, parent: str | None = None) -> Run:
        """Store the intent, submit the plan, store the handle and start the watcher."""
        return self._run(self.send_once(plan, bundle, key=key, parent=parent))

    def _run(self, submitted: Submitted) -> Run:
        run = Run(submitted.run_id, self.store, adopted=submitted.adopted, watch=self.watch)
        run.notes = self.notes
        return run


def submit(
    job: Job | Mapping[str, Any] | str | os.PathLike[str],
    *,
    target: str | None = None,
    key: str | None = None,
    after: Sequence[Run | str] = (),
    **options: Any,
) -> Run:
    """Submit a job (object, dictionary or job file) and return its run; `Submitter` is the long form."""
    run = Submitter(target, **options).submit(job, key=key, after=after)
    run.acknowledge()
    return run
