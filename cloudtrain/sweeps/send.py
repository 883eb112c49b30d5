"""Turn the trials of a sweep into runs: one job over one bundle, each trial under a key of its own."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest
from cloudtrain.history.trials import SweepRecord, TrialRecord
from cloudtrain.job.document import Document
from cloudtrain.job.roles import lift_main
from cloudtrain.runs.planning import plan as planning
from cloudtrain.runs.planning import upstream
from cloudtrain.runs.sending.exactly_once import ExactlyOnce
from cloudtrain.source.bundle import Bundle
from cloudtrain.sweeps.file import SweepFile, read

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.runs.planning.plan import Resolved

TRIAL_LABELS = ("sweep", "trial")
TRIAL = "SWEEP_TRIAL"  # a trial's parameters as JSON, in the environment of its processes


class Trials:
    """Plans and submits the trials of a stored sweep. Not for several threads."""

    def __init__(self, home: Path, record: SweepRecord) -> None:
        self.home, self.sweep_id = home, record.sweep_id
        self.sweep = sweep_of(record.spec)
        self.targets: list[str] = list(record.spec["targets"])
        digest = record.spec["bundle"]
        bundle = Bundle.stored(home / "bundles", digest)
        if bundle is None:
            raise BadRequest(
                f"the bundle {digest[:12]} of {record.sweep_id} is no longer there", "start the sweep again"
            )
        self._folder = tempfile.TemporaryDirectory(prefix=".sweep-", dir=home)
        atexit.register(self._folder.cleanup)
        bundle.extract(Path(self._folder.name, "source"))
        self._bundle = replace(bundle, source=f"{self._folder.name}/source")
        self._submitters: dict[str, ExactlyOnce] = {}
        self._plans: dict[int, Plan] = {}  # of calls, by the number of the trial
        self._first: dict[
            str, Resolved
        ] = {}  # the job of a call on each target; the others differ in their number only

    def most_together(self, number: int, params: Mapping[str, Any], target: str) -> int:
        """Return how many calls the platform takes in one request; 1 where each is to be sent by itself."""
        if not self.sweep.of_calls:
            return 1
        submitter, plan = self._submitter(target), self._plan(number, params, target)
        self._plans[number] = plan
        return 1 if upstream.waits_for(submitter.store, plan) else submitter.client(plan).most_together(plan)

    def expect(self, trials: Sequence[TrialRecord]) -> None:
        """Let the platform send the calls that are submitted next, of one target, in one request. Raises what planning does."""
        self._plans = {trial.number: self._plan(trial.number, trial.params, trial.target) for trial in trials}
        plans = [*self._plans.values()]
        self._submitter(trials[0].target).client(plans[0]).expect(plans, self.sweep.max_parallel)

    def discard(self, trial: TrialRecord) -> None:
        """Stop what may have been sent of a call that is not submitted, together with others; blocking."""
        if plan := self._plans.get(trial.number):
            self._submitter(trial.target).client(plan).discard(plan.attempt_id)

    def submit(self, trial: TrialRecord) -> str:
        """Submit a trial exactly once and return its run's id; blocking. Raises what a submit raises."""
        key = self.key(trial.number)
        submitter = self._submitter(trial.target)
        plan = self._plans.get(trial.number) or self._plan(trial.number, trial.params, trial.target)
        sent = submitter.adopt_interrupted(plan, key, adopt=False) or submitter.send_once(
            plan, self._bundle, key=key, parent=self.sweep_id
        )
        return sent.run_id

    def run_id(self, trial: TrialRecord) -> str:
        """Return the id that the run of a trial has, or will have."""
        return planning.run_id(str(self.sweep.job["name"]), self.key(trial.number))

    def key(self, number: int) -> str:
        return f"{self.sweep_id}/{number}"

    def most_usd(self, number: int, params: Mapping[str, Any], target: str) -> float:
        """Return what a trial can cost at most; raises BadRequest where nothing bounds it."""
        return _most_usd(self._plan(number, params, target))

    def _submitter(self, target: str) -> ExactlyOnce:
        if target not in self._submitters:
            self._submitters[target] = ExactlyOnce(target, home=self.home)
        return self._submitters[target]

    def _plan(self, number: int, params: Mapping[str, Any], target: str) -> Plan:
        submitter = self._submitter(target)
        labels = dict(zip(TRIAL_LABELS, (self.sweep_id, str(number)), strict=True))
        if target in self._first:
            resolved = of_call(self._first[target], params, labels)
        else:
            resolved = resolve(submitter, self.sweep, params, labels)
            if self.sweep.of_calls:
                self._first[target] = resolved
        return submitter.plan_of(resolved, self._bundle, self.key(number))


def sweep_of(spec: Mapping[str, Any]) -> SweepFile:
    """Return the sweep of a stored specification."""
    found = read(spec["document"], Path(spec["folder"]))
    return replace(found, given=spec["given"], targets=spec["targets"])


def resolve(submitter: ExactlyOnce, sweep: SweepFile, params: Mapping[str, Any], labels: Mapping[str, str]) -> Resolved:
    """Return the job of a trial, checked; raises BadJob."""
    lifted = lift_main(sweep.job, None)
    job = {**lifted, "labels": {**(lifted.get("labels") or {}), **labels}}
    job["env"] = {**(job.get("env") or {}), TRIAL: json.dumps(_nested(params), sort_keys=True)}
    sets = [f"{path}={json.dumps(value)}" for path, value in sweep.settings(params).items()]
    return submitter.resolve((Document.of(job, "sweep"), sweep.folder), sets)


def of_call(first: Resolved, params: Mapping[str, Any], labels: Mapping[str, str]) -> Resolved:
    """Return the job of a call of a group, which was resolved for another call: equal to what `resolve` returns."""
    job = first.job
    env = {**job.env, TRIAL: json.dumps(dict(params), sort_keys=True)}
    number = {name: str(value) for name, value in params.items()}
    changes = {"hyperparameters": {**job.hyperparameters, **number}, "env": env, "labels": {**job.labels, **labels}}
    return replace(first, job=job.model_copy(update=changes))


def _nested(params: Mapping[str, Any]) -> dict[str, Any]:
    made = Document.of({}, "sweep")
    for name, value in params.items():
        made.put(tuple(name.split(".")), Document.of(value, "sweep"))
    found: dict[str, Any] = made.value
    return found


def job_of_trial(sweep: SweepFile, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job file's keys with the parameters of a trial in them, without anything of the sweep."""
    made = Document.of(dict(lift_main(sweep.job, None)), "sweep")
    for path, value in sweep.settings(params).items():
        made.put(tuple(path.split(".")), Document.of(value, "sweep"))
    if sweep.given == "file":
        made.put(("env", TRIAL), Document.of(json.dumps(_nested(params), sort_keys=True), "sweep"))
    found: dict[str, Any] = made.value
    return found


def _most_usd(plan: Plan) -> float:
    usd = (plan.at_most or {}).get("usd")
    if usd is None:
        hint = (
            "set limits.max_runtime or limits.max_cost in the job, and resources.usd_per_hour for a machine of your own"
        )
        raise BadRequest("budget.usd needs the maximum cost of a trial, and cloudtrain does not know it", hint)
    return float(usd)


def specification(
    home: Path, document: Mapping[str, Any], sweep: SweepFile, extra: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """Return what the history keeps of a sweep: its file with the job written out, and the bundle of its source; blocking.

    The bundle has the `extra` files too.

    Plans the first trial on each target, so that what is wrong is said before anything is stored. Raises BadRequest.
    """
    from cloudtrain.sweeps.draw import draw

    first = draw(sweep, 1, [])
    assert first is not None, "a sweep needs at least one trial"
    params, _ = first
    targets, bundle = [], None
    name = ""
    for target in sweep.targets:
        submitter = ExactlyOnce(target, home=home, watch=False)
        resolved = resolve(submitter, sweep, params, {})
        bundle = bundle or submitter.package(resolved, extra)
        plan = submitter.plan_of(resolved, bundle)
        if sweep.budget.usd is not None:
            _most_usd(plan)
        targets.append(plan.target or plan.backend)
        name = resolved.job.name
    assert bundle is not None
    job = {**sweep.job, "name": name}
    kept = {key: value for key, value in document.items() if key not in ("job", "program", "command", "image_uri")}
    kept |= {"job": job, "seed": sweep.seed, "name": sweep.name}
    return {
        "document": kept,
        "folder": os.fspath(sweep.folder),
        "given": sweep.given,
        "targets": targets,
        "bundle": bundle.sha256,
    }
