"""Submit a job exactly once, on any backend, and return its run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest
from cloudtrain.policy import apply
from cloudtrain.runs.planning.plan import Resolved
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending.exactly_once import ExactlyOnce, Submitted
from cloudtrain.source.bundle import Bundle

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.job.job import Job

__all__ = ["Submitter", "submit"]


class Submitter(ExactlyOnce):
    """Packages a job, plans it, and submits it exactly once.

    Args:
        target: A backend or a target of cloudtrain.toml. It overrides the job's own target.
        home: Folder of the history; None for CLOUDTRAIN_HOME or ~/.local/share/cloudtrain.
        watch: Whether to start a background watcher. With False, call `cloudtrain wait --foreground`: use it in CI and in
            containers, where a background process would be killed.
        confirm: Called with one sentence when a run may cost more than `confirm_above` of cloudtrain.toml. It raises to
            submit nothing.
        force: Submit a job even if it does not fit on its GPUs.
        clock: Replaces the system's clock in tests; see `cloudtrain.testing.clock`.
        options: Options of the backend. They override those of the job and of the target.
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

        The submission is stored before the request is sent. When an earlier submit of the same job was interrupted, this
        call finishes that run and returns it (`run.adopted`). When the platform's answer is lost, the run is returned
        QUEUED, and the watcher finds out later whether the platform has the job.

        Args:
            job: A Job, a dictionary of its keys, or the path of a job file.
            sets: Changes of the job, such as `num_nodes=2`, as in `cloudtrain submit --set`.
            key: Idempotency key: the same key returns the same run. If that run ended before anything ran (refused, or
                cancelled before it started), the key starts a new run.
            new: Start a second run although an earlier submit of the job was interrupted.
            adopt: Continue an interrupted submit even if it is older than 15 minutes or failed.
            parent: Id of the run that this one is recorded as a copy of.
            after: Runs or run ids. The run stays QUEUED until all of them have SUCCEEDED. It replaces the job's `after`.

        Returns:
            The run, accepted by the platform or QUEUED.

        Raises:
            BadRequest: the job is wrong, `key` was used for another job, an old interrupted submit is in the way, or a
                budget is spent (OverBudget).
            BackendError: the platform refuses the job; the run is FAILED.
            StoreError: the history cannot be used.
        """
        if after:
            sets = [*sets, f"after={json.dumps([one if isinstance(one, str) else one.run_id for one in after])}"]
        plan, bundle = self.plan_job(job, sets, key)
        if new:
            return self.send(plan, bundle, key=key, parent=parent)
        return self.adopt_or_send(plan, bundle, key=key, adopt=adopt, parent=parent)

    def adopt_or_send(
        self, plan: Plan, bundle: Bundle, *, key: str | None = None, adopt: bool = False, parent: str | None = None
    ) -> Run:
        """Submit a plan unless an interrupted submit of its job, or the run of its key, is there; blocking.

        Args:
            plan: What to submit.
            bundle: The packaged source whose digest the plan has.
            key: As of `submit`.
            adopt: As of `submit`.
            parent: As of `submit`.

        Returns:
            The run, that of the earlier submit where there is one.

        Raises:
            BadRequest: As of `submit`.
            BackendError: The platform refuses the job; the run is FAILED.
        """
        if found := self.adopt_interrupted(plan, key, adopt=adopt):
            return self._run(found)
        return self.send(plan, bundle, key=key, parent=parent)

    def submit_plan(self, plan: Plan) -> Run:
        """Submit exactly this plan, once; blocks until the platform has answered.

        Args:
            plan: A plan of `plan`, or read from a file that `cloudtrain plan -o` wrote.

        Returns:
            The run; the same run when the plan was submitted before.

        Raises:
            BadRequest: The source has changed since the plan was made.
            BackendError: The platform refuses the job; the run is FAILED.
        """
        if self.store.get(plan.run_id):
            return self._run(self.existing(plan))
        plan = apply.check_stored(plan, registry.create_for(plan, self.home, self.clock), self.home, Path.cwd())
        digest = str(plan.bundle["sha256"])
        bundle = Bundle.stored(self.home / "bundles", digest)
        if bundle is None:
            from cloudtrain.job.job import Job

            bundle = self.package(Resolved(Job.from_dict(plan.job), plan.target, plan.backend))
            if bundle.sha256 != digest:
                raise BadRequest("the source has changed since the plan was made", "run cloudtrain plan again")
        return self.send(plan, bundle)

    def send(self, plan: Plan, bundle: Bundle, *, key: str | None = None, parent: str | None = None) -> Run:
        """Submit a plan with its packaged source, and start the watcher; blocks until the platform has answered.

        Args:
            plan: What to submit.
            bundle: The packaged source whose digest the plan has.
            key: As of `submit`.
            parent: As of `submit`.

        Returns:
            The run.

        Raises:
            BackendError: The platform refuses the job; the run is FAILED.
        """
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
    """Submit a job and return its run; blocks until the platform has answered. `Submitter` has more options.

    Args:
        job: A Job, a dictionary of its keys, or the path of a job file.
        target: A backend or a target of cloudtrain.toml. It overrides the job's own target.
        key: Idempotency key: the same key returns the same run.
        after: Runs or run ids that must have SUCCEEDED before this one starts.
        options: Options of the backend, and the other arguments of Submitter.

    Returns:
        The run; `run.wait()` blocks until it has ended.

    Raises:
        BadRequest: The job is wrong, or `key` was used for another job.
        BackendError: The platform refuses the job; the run is FAILED.
    """
    run = Submitter(target, **options).submit(job, key=key, after=after)
    run.acknowledge()
    return run
