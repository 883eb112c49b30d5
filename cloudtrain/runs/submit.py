"""Submit a job exactly once, on any backend; adopt an interrupted submission of the same job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cloudtrain.backends.api import HasLabels, Plan
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.history.records import AttemptRecord, RunRecord
from cloudtrain.history.store import Store
from cloudtrain.job import configfile
from cloudtrain.nodes.process import Process
from cloudtrain.runs import attempts, keys, send, watcher
from cloudtrain.runs.keys import identity
from cloudtrain.runs.plan import Planner, Resolved
from cloudtrain.runs.run import Run
from cloudtrain.runs.send import Outcome, Refused
from cloudtrain.source import provenance
from cloudtrain.source.bundle import Bundle

if TYPE_CHECKING:
    from cloudtrain.job.job import Job


class Submitter(Planner):
    """Packages a job, plans it, and submits it exactly once.

    `target` is a backend or a target of cloudtrain.toml, and wins over the job's own; `options` are that backend's and
    win over all others. `home` is where the history lives. With `watch=False` nobody follows the run until somebody
    calls `cloudtrain watch` (for CI and containers, where a detached process would not survive).
    """

    def __init__(
        self, target: str | None = None, *, home: Path | None = None, watch: bool = True, **options: Any
    ) -> None:
        super().__init__(target, home=home, **options)
        self.store = Store(self.home)
        self.watch = watch
        self.notes: list[str] = []  # warnings of the last submit, one sentence each

    def submit(
        self,
        job: Job | Mapping[str, Any] | str | os.PathLike[str],
        *,
        sets: Sequence[str] = (),
        key: str | None = None,
        new: bool = False,
        adopt: bool = False,
        parent: str | None = None,
    ) -> Run:
        """Submit a job and return its run; blocks until the platform has answered.

        The intent is stored before anything is sent. When an earlier submit of the same job was interrupted, that run is
        finished and returned instead (`run.adopted`). One that is older than 15 minutes or has failed since needs a
        decision: `adopt` takes it, `new` starts another run. `key` names the run: the same key returns the same run.

        When the answer is lost, the run is returned QUEUED without a handle, and its watcher finds out what happened.

        Raises:
            BadRequest: the job is wrong, `key` was used for another job, or an old interrupted submit is in the way.
            BackendError: the platform refuses the job; the run is FAILED.
            StoreError: the history cannot be used.
        """
        resolved = self.resolve(job, sets)
        bundle = self.package(resolved)
        plan = self.plan_of(resolved, bundle, key)
        if not new and (run := self._adopt(plan, key, adopt=adopt)):
            return run
        return self.send(plan, bundle, key=key, parent=parent)

    def submit_plan(self, plan: Plan) -> Run:
        """Submit exactly this plan, once; raises BadRequest when the bundle of its digest can no longer be made."""
        if self.store.get(plan.run_id):
            return self._existing(plan)
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
        _check_secrets(plan)
        origin = {**provenance.of(bundle), "configuration": [str(path) for path in configfile.paths(self._folder)]}

        def intent() -> bool:
            return self.store.intend(
                plan, identity=identity(plan), owner=Process.here(), key=key, parent=parent, provenance=origin
            )

        backend = attempts.backend_of(plan, self.home)
        outcome = send.send_attempt(self.store, plan, backend, bundle, intent)
        if outcome is None:
            return self._existing(plan)
        return self._finish_submit(plan.run_id, outcome)

    def _finish_submit(self, run_id: str, outcome: Outcome | None, *, adopted: bool = False) -> Run:
        """Return a run whose submission has an outcome, watched; raises what the platform refused it with."""
        if isinstance(outcome, Refused) and not outcome.waiting:
            self.store.acknowledge(run_id)  # the person reads why: the next submit is another one
            raise outcome.error
        run = Run(run_id, self.store, adopted=adopted, watch=self.watch)
        if self.watch and not (adopted and (run.record.status.state.final or self.store.watched(run_id))):
            watcher.start(self.store, run.attempts[-1].plan)
        return run

    # -- exactly once -------------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan, key: str | None, *, adopt: bool) -> Run | None:
        """Return the run of an interrupted submit of this very job, its submission finished, or the run of a key.

        For interrupted submissions of other jobs the platform is asked only if backend and target are this job's. The
        others are listed in `notes`.
        """
        if key is not None:
            return self._existing(plan) if self.store.get(plan.run_id) else self._on_platform(plan, key)
        mine: AttemptRecord | None = None
        not_checked: list[str] = []
        for attempt in self.store.unsettled():
            free = send.is_free(attempt)
            if attempt.handle is not None and (not free or attempt.owner == str(Process.here())):
                continue  # accepted: whoever submitted it still lives, and knows its run
            if not free and not attempt.unanswered_since:
                continue  # somebody submits it just now
            run = self.store.find(attempt.run_id)
            if run.key is None and keys.same(attempt.plan, plan):
                if mine is None and not run.cancel_requested:
                    mine = attempt
            elif free and attempt.handle is None and not self._look_for(attempt, plan):
                not_checked.append(f"{attempt.run_id} ({run.target})")
        if not_checked:
            self.notes.append(
                f"interrupted submissions that were not checked: {', '.join(not_checked)}; "
                "`cloudtrain show RUN` checks one, `cloudtrain cancel RUN` ends them"
            )
        if mine is None:
            return None
        run = self.store.find(mine.run_id)
        if not adopt and (run.status.failed or send.age_s(mine) > send.ADOPTABLE_S):
            _raise_undecided(run, send.age_s(mine))
        return self._finish(mine)

    def _look_for(self, attempt: AttemptRecord, plan: Plan) -> bool:
        """Accept an interrupted submission of another job if the platform has it; False where that was not asked."""
        if (attempt.plan.backend, attempt.plan.target) != (plan.backend, plan.target):
            return False
        try:
            handle = attempts.backend_of(attempt.plan, self.home).find(attempt.attempt_id)
        except CloudtrainError:
            return False
        if handle is not None:
            self.store.accept(attempt.attempt_id, handle)
        return True

    def _on_platform(self, plan: Plan, key: str) -> Run | None:
        """Return the run of a key that the platform knows and this history does not (another machine, CI)."""
        backend = attempts.backend_of(plan, self.home)
        handle = backend.find(plan.attempt_id)
        if handle is None:
            return None
        if isinstance(backend, HasLabels):
            keys.check_labels(key, plan, backend.labels(handle))
        if not self.store.intend(plan, identity=identity(plan), owner=Process.here(), key=key):
            return self._existing(plan)
        self.store.accept(plan.attempt_id, handle)
        while later := backend.find(f"{plan.run_id}-a{plan.attempt + 1}"):
            self.store.record(plan.attempt_id, status=backend.status(handle))
            plan, _ = attempts.replan(plan, plan.attempt + 1, backend, self.home)
            if not self.store.next_attempt(plan, owner=Process.here()):
                break
            self.store.accept(plan.attempt_id, later)
            handle = later
        if self.watch:
            watcher.start(self.store, plan)
        return Run(plan.run_id, self.store, adopted=True, watch=self.watch)

    def _existing(self, plan: Plan) -> Run:
        """Return the run of a plan's id that is in the history; raises BadRequest where it is of another job."""
        record = self.store.find(plan.run_id)
        if record.attached:
            raise BadRequest(
                f"{record.run_id} was submitted elsewhere (attached from {record.attached})",
                f"cloudtrain wait {record.run_id}",
            )
        newest = self.store.attempts(plan.run_id)
        if record.key is not None and not keys.same(newest[0].plan, plan):
            keys.refuse(record, newest[0].plan, plan)
        return self._finish(newest[-1])

    def _finish(self, attempt: AttemptRecord) -> Run:
        """Return the run of an attempt that is stored, its submission finished if nobody else does that."""
        outcome: Outcome | None = None
        unsent = attempt.handle is None and not attempt.status.state.final and send.is_free(attempt)
        if unsent and not self.store.find(attempt.run_id).cancel_requested:  # a cancelled one is left to its watcher
            _check_secrets(attempt.plan)
            outcome = send.send_again(self.store, attempt, attempts.backend_of(attempt.plan, self.home))
        return self._finish_submit(attempt.run_id, outcome, adopted=True)


def submit(
    job: Job | Mapping[str, Any] | str | os.PathLike[str],
    *,
    target: str | None = None,
    key: str | None = None,
    **options: Any,
) -> Run:
    """Submit a job (object, dictionary or job file) and return its run; `Submitter` is the long form."""
    run = Submitter(target, **options).submit(job, key=key)
    run.acknowledge()
    return run


def _raise_undecided(run: RunRecord, age_s: float) -> NoReturn:
    """Raise BadRequest: it is not clear whether an interrupted submit of the same job is still wanted."""
    since = f"{age_s / 60:.0f} min" if age_s < 2 * 3600 else f"{age_s / 3600:.0f} h"
    what = f"has ended {run.status.state} since" if run.status.failed else "was interrupted"
    raise BadRequest(
        f"the same job was submitted {since} ago as {run.run_id}, and that {what}",
        f"--adopt takes {run.run_id}, --new starts another run",
    )


def _check_secrets(plan: Plan) -> None:
    """Raise BadRequest where this process does not have what the job's secrets come from."""
    if missing := attempts.missing_secrets(plan):
        sources = {name: " or ".join(plan.manifest["secrets"][name]) for name in missing}
        unset = "; ".join(f"secret {name}: {source} is not set" for name, source in sources.items())
        raise BadRequest(unset, "export it, or use another source")
