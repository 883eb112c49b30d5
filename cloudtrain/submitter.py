"""Submitter: from a job to a run, on any backend, exactly once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain import attempts, configfile, provenance, spawn
from cloudtrain.backend import Plan
from cloudtrain.bundle import Bundle
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.planner import Planner, Resolved
from cloudtrain.process import Process
from cloudtrain.records import AttemptRecord
from cloudtrain.run import Run
from cloudtrain.sending import sending
from cloudtrain.state import State, Status
from cloudtrain.store import Store, now

if TYPE_CHECKING:
    from cloudtrain.job import Job


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

    def submit(
        self,
        job: Job | Mapping[str, Any] | str | os.PathLike[str],
        *,
        sets: Sequence[str] = (),
        key: str | None = None,
        new: bool = False,
        parent: str | None = None,
    ) -> Run:
        """Submit a job and return its run; blocks until the platform has accepted it.

        The intent is stored before anything is sent. When an earlier submit of the same job was killed on its way, that
        run is adopted instead, unless `new`. `key` names the run: submitting the same key again returns the same run.
        Raises BadRequest, BackendError, StoreError.
        """
        resolved = self.resolve(job, sets)
        bundle = self.package(resolved)
        plan = self.plan_of(resolved, bundle, key)
        if not new and (run := self._adopt(plan, key)):
            return run
        return self.send(plan, bundle, key=key, parent=parent)

    def submit_plan(self, plan: Plan) -> Run:
        """Submit exactly this plan, once; raises BadRequest when the bundle of its digest can no longer be made."""
        if self.store.get(plan.run_id):
            return self._settled(plan.run_id)
        digest = str(plan.bundle["sha256"])
        bundle = Bundle.stored(self.home / "bundles", digest)
        if bundle is None:
            from cloudtrain.job import Job

            bundle = self.package(Resolved(Job.from_dict(plan.job), plan.target, plan.backend))
            if bundle.sha256 != digest:
                raise BadRequest("the source has changed since the plan was made", "make the plan again")
        return self.send(plan, bundle)

    def send(self, plan: Plan, bundle: Bundle, *, key: str | None = None, parent: str | None = None) -> Run:
        """Store the intent, submit the plan, store the handle and start the watcher."""
        me = Process.here()
        if missing := attempts.missing_secrets(plan):
            sources = ", ".join(plan.manifest["secrets"][missing[0]])
            raise BadRequest(
                f"the secret {missing[0]} cannot be had: {sources} is not in the environment"
                + (f" (nor are those of {', '.join(missing[1:])})" if missing[1:] else ""),
                "export it and try again",
            )
        origin = {**provenance.of(bundle), "configuration": [str(path) for path in configfile.paths(self._folder)]}
        wish = identity(plan)
        with sending(plan.attempt_id):
            if not self.store.intend(plan, identity=wish, owner=me, key=key, parent=parent, provenance=origin):
                return self._settled(plan.run_id)
            backend = attempts.backend_of(plan, self.home)
            try:
                handle = backend.submit(plan, bundle)
            except CloudtrainError as error:
                refused = Status(State.FAILED, None, error.message, ended_at=now())
                self.store.record(plan.attempt_id, status=refused)
                self.store.set_status(plan.run_id, refused)
                self.store.acknowledge(plan.run_id)  # the person is told: the next submit is another wish
                raise
            self.store.accept(plan.attempt_id, handle)
        if self.watch:
            spawn.watcher(self.store, plan)
        return Run(plan.run_id, self.store, watch=self.watch)

    # -- exactly once -------------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan, key: str | None) -> Run | None:
        """Settle what killed submits left behind, and return the run of this very wish if there is one."""
        mine: Run | None = None
        wish = identity(plan)
        for attempt in self.store.unsettled():
            owner = Process.parse(attempt.owner)
            if owner is None or owner.alive is not False:
                continue
            run = self.store.find(attempt.run_id)
            if mine is None and run.identity == wish and (key is None or run.key == key):
                mine = self._finish(attempt)
            elif attempt.handle is None and (
                handle := attempts.backend_of(attempt.plan, self.home).find(attempt.attempt_id)
            ):
                self.store.accept(attempt.attempt_id, handle)
        if mine is None and key is not None:
            return self._settled(plan.run_id) if self.store.get(plan.run_id) else self._found(plan, key)
        return mine

    def _found(self, plan: Plan, key: str) -> Run | None:
        """Return the run of a key that the platform knows and this store does not (another machine, CI)."""
        backend = attempts.backend_of(plan, self.home)
        handle = backend.find(plan.attempt_id)
        if handle is None or not self.store.intend(plan, identity=identity(plan), owner=Process.here(), key=key):
            return None
        self.store.accept(plan.attempt_id, handle)
        while later := backend.find(f"{plan.run_id}-a{plan.attempt + 1}"):
            self.store.record(plan.attempt_id, status=backend.status(handle))
            plan, _ = attempts.replan(plan, plan.attempt + 1, backend, self.home)
            if not self.store.next_attempt(plan, owner=Process.here()):
                break
            self.store.accept(plan.attempt_id, later)
            handle = later
        if self.watch:
            spawn.watcher(self.store, plan)
        return Run(plan.run_id, self.store, adopted=True, watch=self.watch)

    def _settled(self, name: str) -> Run:
        """Return a run that is already in the store, its submit finished if the one who began it has died."""
        attempt = self.store.attempts(name)[-1]
        owner = Process.parse(attempt.owner)
        if attempt.handle is None and owner is not None and owner.alive is False:
            return self._finish(attempt)
        return Run(name, self.store, adopted=True, watch=self.watch)

    def _finish(self, attempt: AttemptRecord) -> Run:
        me = Process.here()
        if attempt.handle is None and self.store.claim(attempt.attempt_id, of=attempt.owner, by=me):
            attempts.settle(self.store, attempt, attempts.backend_of(attempt.plan, self.home))
        if self.watch and not self.store.watched(attempt.run_id):
            spawn.watcher(self.store, attempt.plan)
        return Run(attempt.run_id, self.store, adopted=True, watch=self.watch)


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


def identity(plan: Plan) -> str:
    """Return what makes two submits the same wish: the job, the user's own files, the target.

    Not the whole bundle: it holds our launcher too, and the wish is the same after an upgrade of this package.
    """
    job = {name: value for name, value in plan.job.items() if name not in ("labels", "source")}
    text = json.dumps([job, plan.bundle.get("source_sha256"), plan.backend, plan.target], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
