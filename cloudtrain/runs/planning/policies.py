"""Apply policies while a run is planned, and check stored plans again before they are sent; opens no connection."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job.targets import named_targets
from cloudtrain.policy import changes, checks, find
from cloudtrain.policy.files import BadPolicy, Policy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.job.document import Document
    from cloudtrain.job.job import Job
    from cloudtrain.job.targets import Resolved


@dataclass
class Governed:
    """A job as its policies have changed it, and the policies that its plan is checked against."""

    job: Job
    options: Mapping[str, Any]  # of its backend
    policies: list[Policy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    installed: Sequence[EntryPoint] = ()  # policies of packages
    refused: Sequence[Problem] = ()  # what these refuse

    def check(self, plan: Plan, backend: Backend) -> Plan:
        """Return a plan with its policies; raises Refused with all that they refuse."""
        refused = [*self.refused]
        if self.policies:
            refused[:0] = checks.find_problems(self.policies, plan, backend)
        if refused:
            raise checks.Refused(self.job.located(refused))
        return replace(plan, policies=_kept(self.policies, self.installed))


def _kept(found: Sequence[Policy], installed: Sequence[EntryPoint]) -> tuple[Mapping[str, Any], ...]:
    return (*(policy.to_dict() for policy in found), *changes.describe(installed))


def govern(
    resolution: Resolved,
    folder: Path,
    home: Path,
    *,
    overrides: Mapping[str, Any],
    earlier: Sequence[Mapping[str, Any]],
    again: Callable[[Sequence[Document]], Resolved],
) -> Governed:
    """Return a resolved job as its policies change it; blocking: reads files.

    Args:
        folder: the job file's. Policies are looked for there, and where the job's source and script are.
        overrides: options of the backend that win over the job's, and not over a policy's.
        earlier: the policies of an older plan of the run, which hold too.
        again: resolves the job once more, under what rules set.

    Raises:
        BadPolicy: a policy cannot be used, or a rule's `on` matches nothing that is known.
        BadRequest: the policy of an installed package fails, or moves the job.
    """
    target, backend = resolution.target, resolution.backend
    given = resolution.job
    policies, notes = find.find(find.folders_of(folder, given.source, given.entrypoint), home, earlier)
    if policies:
        from cloudtrain.policy import names

        notes += names.check(policies, {target, *named_targets(folder)})
    found = list(changes.settings(policies, target, backend))
    options = {**resolution.options, **overrides}
    if found:
        before = resolution.job.to_dict()
        resolution = again([document for _, document in found])
        after = resolution.job.to_dict()
        for rule, document in found:
            notes += changes.describe_settings(rule, before, after)
            options |= (document.value.get("options") or {}).get(backend) or {}
        if (resolution.target, resolution.backend) != (target, backend):
            raise BadPolicy("a policy cannot move a job to another target", "targets = [...] refuses others")
    job = resolution.job.model_copy(update={"options": {**resolution.job.options, backend: options}})
    points = changes.entry_points()
    context = changes.Context(target, backend, getpass.getuser())
    made, more, refused = changes.apply_entry_points(points, job, context)
    if made.target != job.target:
        raise BadRequest("the policy of an installed package moves the job to another target", "it may refuse it")
    return Governed(made, made.options.get(backend, {}), policies, notes + more, points, refused)


def check_stored(plan: Plan, backend: Backend, home: Path, folder: Path | None = None) -> Plan:
    """Return a plan that was made earlier, checked against the policies of now; blocking: reads files.

    The policies are those that it was planned under, and those of a folder and of its source.

    Raises:
        Refused: a rule refuses it, or a policy would change its job.
        BadPolicy: a policy cannot be used.
    """
    from cloudtrain.job.job import Job

    job = plan.job
    folders = find.folders_of(folder, str(job["source"]), job.get("entrypoint")) if folder else []
    policies, notes = find.find(folders, home, plan.policies)
    refused = checks.find_problems(policies, plan, backend)
    for policy in policies:
        refused += changes.missing_settings([policy], plan.target, plan.backend, plan.job)
    if points := changes.entry_points():
        context = changes.Context(plan.target, plan.backend, getpass.getuser())
        _, changed, more = changes.apply_entry_points(points, Job.from_dict(plan.job), context)
        refused += more
        refused += [Problem(f"{text}: the plan was made without it", hint="make the plan again") for text in changed]
    if refused:
        raise checks.Refused(refused)
    return replace(plan, policies=_kept(policies, points), notes=(*plan.notes, *notes))
