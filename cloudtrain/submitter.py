"""Submitter: from a job to a run, on any backend."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain import config, configfile, provenance, registry, watch
from cloudtrain.backend import Backend, Feature, Plan
from cloudtrain.bundle import Bundle
from cloudtrain.errors import BadJob, BadRequest, CloudtrainError, Problem
from cloudtrain.importing import Quickly
from cloudtrain.process import Process
from cloudtrain.run import Run
from cloudtrain.sending import sending
from cloudtrain.state import State, Status
from cloudtrain.store import AttemptRecord, Store, now

if TYPE_CHECKING:
    from cloudtrain.document import Document
    from cloudtrain.job import Job


class Submitter:
    """Packages a job, plans it, and submits it exactly once.

    `target` is a backend or a target of cloudtrain.toml, and wins over the job's own; `options` are that backend's and
    win over all others. `home` is where the history lives. With `watch=False` nobody follows the run until somebody
    calls `cloudtrain watch` (for CI and containers, where a detached process would not survive).
    """

    def __init__(
        self, target: str | None = None, *, home: Path | None = None, watch: bool = True, **options: Any
    ) -> None:
        self.target = target
        self.home = home or config.home()
        self.store = Store(self.home)
        self.watch = watch
        self.overrides = options
        self._folder = Path.cwd()  # of the job: where its cloudtrain.toml is looked for

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

    def plan(
        self, job: Job | Mapping[str, Any] | str | os.PathLike[str], *, sets: Sequence[str] = (), key: str | None = None
    ) -> Plan:
        """Return what `submit` would send; packages the source, but sends and stores nothing else."""
        resolved = self.resolve(job, sets)
        return self.plan_of(resolved, self.package(resolved), key)

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
        if missing := watch.missing_secrets(plan):
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
            backend = watch.backend_of(plan, self.home)
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
            watch.spawn(self.store, plan)
        return Run(plan.run_id, self.store, watch=self.watch)

    # -- the steps ----------------------------------------------------------------------------------------------------

    def resolve(
        self,
        job: Job | Mapping[str, Any] | str | os.PathLike[str] | tuple[Document, Path],
        sets: Sequence[str] = (),
    ) -> Resolved:
        """Return the job with its target's options merged in and validated; raises BadJob with all problems.

        A document comes with the folder in which it would be a file.
        """
        if isinstance(job, tuple):
            self._folder = job[1]
        else:
            self._folder = Path(job).absolute().parent if isinstance(job, str | os.PathLike) else Path.cwd()
        with Quickly():
            found = config.resolve(job, sets, target=self.target, backends=registry.Names())
            kind = registry.backend_class(found.backend)
            options = {**found.options, **self.overrides}
            problems = [*_unsupported(found.job, kind), *_invalid(options, kind, found.backend)]
        if problems:
            raise BadJob(found.job.located(problems))
        ready = found.job.model_copy(update={"options": {found.backend: options}, "target": found.target})
        return Resolved(ready, found.target, found.backend)

    def package(self, resolved: Resolved) -> Bundle:
        """Return the bundle of a job's source, made or found below the home."""
        job = resolved.job
        needed = [name for name in (_script(job.entrypoint), job.environment.requirements) if name]
        folder = Path(job.source)
        if _remote(job):
            from cloudtrain import checkout

            folder, _ = checkout.fetch_git(job.source, self.home / "sources")
        bundle = Bundle.make(folder, self.home / "bundles", must_have=needed, **job.exceptions)
        sources = [source[4:] for found in job.secrets.values() for source in found if source.startswith("env:")]
        provenance.keep(bundle, [os.environ[name] for name in sources if name in os.environ])
        return bundle

    def plan_of(self, resolved: Resolved, bundle: Bundle, key: str | None = None) -> Plan:
        """Return the plan of a job over a bundle, under a new run id or the one of `key`."""
        labels = {"user": _label(getpass.getuser()), **resolved.job.labels}
        if bundle.commit:
            labels["commit"] = bundle.commit[:12] + ("-dirty" if bundle.dirty else "")
        changes: dict[str, Any] = {"labels": labels}
        if _remote(resolved.job) and bundle.commit:
            from cloudtrain import checkout

            changes["source"] = checkout.pin(resolved.job.source, bundle.commit)
        job = resolved.job.bind([file.path for file in bundle.files]).model_copy(update=changes)
        backend = self.backend(resolved)
        plan = replace(backend.plan(job, bundle, run_id(job.name, key)), target=resolved.target)
        if job.retry.max_attempts > 1 and job.entrypoint is not None:  # the shared trainer resumes
            from cloudtrain import resuming

            if told := resuming.note(job, bundle):
                plan = replace(plan, notes=(*plan.notes, told))
        return plan

    def backend(self, resolved: Resolved) -> Backend:
        return registry.create(resolved.backend, resolved.job.options.get(resolved.backend, {}), self.home)

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
                handle := watch.backend_of(attempt.plan, self.home).find(attempt.attempt_id)
            ):
                self.store.accept(attempt.attempt_id, handle)
        if mine is None and key is not None:
            return self._settled(plan.run_id) if self.store.get(plan.run_id) else self._found(plan, key)
        return mine

    def _found(self, plan: Plan, key: str) -> Run | None:
        """Return the run of a key that the platform knows and this store does not (another machine, CI)."""
        backend = watch.backend_of(plan, self.home)
        handle = backend.find(plan.attempt_id)
        if handle is None or not self.store.intend(plan, identity=identity(plan), owner=Process.here(), key=key):
            return None
        self.store.accept(plan.attempt_id, handle)
        while later := backend.find(f"{plan.run_id}-a{plan.attempt + 1}"):
            self.store.record(plan.attempt_id, status=backend.status(handle))
            plan, _ = watch.replan(plan, plan.attempt + 1, backend, self.home)
            if not self.store.next_attempt(plan, owner=Process.here()):
                break
            self.store.accept(plan.attempt_id, later)
            handle = later
        if self.watch:
            watch.spawn(self.store, plan)
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
            watch.settle(self.store, attempt, watch.backend_of(attempt.plan, self.home))
        if self.watch and not self.store.watched(attempt.run_id):
            watch.spawn(self.store, attempt.plan)
        return Run(attempt.run_id, self.store, adopted=True, watch=self.watch)


class Resolved:
    """A validated job together with the target and backend that were chosen for it."""

    def __init__(self, job: Job, target: str, backend: str) -> None:
        self.job = job
        self.target = target
        self.backend = backend


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


def run_id(name: str, key: str | None = None) -> str:
    """Return a new run id, or the one that a key always gives."""
    if key is not None:
        return f"{name}-k{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    stamp = datetime.now(UTC).strftime("%y%m%d-%H%M%S")
    return f"{name}-{stamp}-{''.join(secrets.choice(alphabet) for _ in range(4))}"


def identity(plan: Plan) -> str:
    """Return what makes two submits the same wish: the job, the user's own files, the target.

    Not the whole bundle: it holds our launcher too, and the wish is the same after an upgrade of this package.
    """
    job = {name: value for name, value in plan.job.items() if name not in ("labels", "source")}
    text = json.dumps([job, plan.bundle.get("source_sha256"), plan.backend, plan.target], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _script(entrypoint: str | None) -> str | None:
    """Return the file that an entrypoint needs in the source, where it names one."""
    return entrypoint if entrypoint and not entrypoint.startswith("-m") else None


def _remote(job: Job) -> bool:
    return job.source.startswith("git+")


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower())[:63].strip("-") or "unknown"


def _unsupported(job: Job, kind: type[Backend]) -> list[Problem]:
    """Return what the job wants and the backend cannot do."""
    sources = {source.partition(":")[0] for found in job.secrets.values() for source in found}
    uris = {f"inputs.{name}": item.uri for name, item in job.inputs.items()} | (
        {"output": job.output} if job.output else {}
    )
    wants = [
        (Feature.MULTI_NODE, job.num_nodes > 1, "num_nodes"),
        (Feature.MIN_NODES, job.min_nodes is not None, "min_nodes"),
        (Feature.SPOT, job.resources.use_spot, "resources.use_spot"),
        (Feature.IMAGES, job.image is not None, "image"),
        (Feature.INSTANCE_TYPES, job.resources.instance_type is not None, "resources.instance_type"),
        (Feature.ENV_SECRETS, "env" in sources, "secrets"),
        (Feature.FILE_SECRETS, "file" in sources, "secrets"),
    ]
    for path, uri in uris.items():
        remote = "://" in uri and not uri.startswith("file://")
        wants.append((Feature.OBJECT_STORES if remote else Feature.LOCAL_PATHS, True, path))
    return [
        Problem(f"the backend {kind.name} does not offer {feature}", path, _instead(feature, kind))
        for feature, wanted, path in wants
        if wanted and feature not in kind.features
    ]


def _instead(feature: Feature, kind: type[Backend]) -> str:
    """Return what to write where a backend does not offer something; "" where nobody knows."""
    if feature is Feature.ENV_SECRETS:
        stores = "name a secret store: aws-secretsmanager:NAME or gcp-secretmanager:NAME"
        return (
            "write it into a file of mode 600 on the node: file:PATH"
            if Feature.FILE_SECRETS in kind.features
            else stores
        )
    return ""


def _invalid(options: Mapping[str, Any], kind: type[Backend], name: str) -> list[Problem]:
    """Return what the backend's own model finds wrong with its options."""
    from pydantic import ValidationError

    from cloudtrain import problems

    model = kind.options()
    try:
        model.model_validate(options)
    except ValidationError as error:
        return problems.explain(error, model, prefix=("options", name))
    return []
