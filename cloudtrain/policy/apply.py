"""The policies of a job: which ones hold, what they change while a run is planned, checked again before a plan is sent.

A policy is in force beside each cloudtrain.toml that counts, and where `[policy] from` of one names it. Nothing here
opens a connection.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.registry import installed
from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job import configfile, targets
from cloudtrain.policy import changes, checks
from cloudtrain.policy.files import POLICY_FILE, BadPolicy, Policy, read

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.job.document import Document
    from cloudtrain.job.job import Job
    from cloudtrain.job.targets import Resolved

GROUP = "cloudtrain.policies"  # of entry points


def find(
    folders: Sequence[Path], home: Path, earlier: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[Policy], list[str]]:
    """Return the policies for a job that concerns some folders, and notes; reads files, opens no connection.

    Args:
        folders: at or above each of them the project's policy.toml is looked for; the nearest of each counts.
        home: where copies of an organisation's policies are pinned.
        earlier: what an older plan of the run keeps of its policies: these hold too.

    Raises:
        BadPolicy: a file is wrong, or an organisation's policy is not pinned here.
    """
    found: dict[str, Policy] = {}
    for folder in folders:
        for path in targets.config_files(folder, POLICY_FILE):
            found.setdefault(str(path), read(path))
    for folder in folders:
        for url, sha256 in configured(folder).items():
            from cloudtrain.policy import pin

            pinned = pin.load(url, home, sha256)
            found[pinned.file] = pinned
    notes = []
    for old in earlier:
        if old.get("code"):  # of an installed package, which is asked at every plan
            continue
        path = Path(old["file"])
        if str(path) in found:
            continue
        if not path.is_file():
            notes.append(f"the policy {path} of an earlier attempt no longer exists: its rules were not checked")
        elif old.get("from"):
            from cloudtrain.policy import pin

            found[str(path)] = pin.load(str(old["from"]), home)
        else:
            found[str(path)] = read(path)
    return list(found.values()), notes


def folders_of(folder: Path, source: str, entrypoint: str | Sequence[str] | None) -> list[Path]:
    """Return where a job's policies are looked for: at its job file, its source and its script.

    Args:
        folder: the job file's, or the current one.
        source: the folder that is packaged; an address names none.
        entrypoint: as in the job file.
    """
    found = [folder.absolute()]
    root = Path(source)
    if "://" not in source and root.is_dir():
        found.append(root.absolute())
        if isinstance(entrypoint, str) and (root / entrypoint).is_file():
            found.append((root / entrypoint).absolute().parent)
    return list(dict.fromkeys(found))


def configured(folder: Path) -> dict[str, str]:
    """Return the addresses of the organisation's policies that a folder's configuration names, with their digests or ""."""
    found = {}
    for path in targets.config_files(folder):
        table = configfile.read(path).value.get("policy") or {}
        if table:
            found[str(table["from"])] = str(table.get("sha256") or "")
    return found


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
        refused, notes = [*self.refused], plan.notes
        if self.policies:
            refused[:0] = checks.find_problems(self.policies, plan, backend)
            notes = (*checks.unchecked(self.policies, plan, backend), *notes)
        if refused:
            raise checks.Refused(self.job.located(refused))
        return replace(plan, notes=notes, policies=_kept(self.policies, self.installed))


def _kept(found: Sequence[Policy], installed: Sequence[EntryPoint]) -> tuple[Mapping[str, Any], ...]:
    code = [{"file": "", "sha256": "", "rules": 0, "from": "", "as_of": "", "code": f"{point.name} ({point.value})"}
            for point in installed]  # fmt: skip
    return (*(policy.to_dict() for policy in found), *code)


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
    policies, notes = find(folders_of(folder, given.source, given.entrypoint), home, earlier)
    if policies:
        from cloudtrain.policy import names

        notes += names.check(policies, {target, *targets.named_targets(folder)})
    found = list(changes.settings(policies, target, backend)) if policies else []
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
    refused: list[Problem] = []
    if points := installed(GROUP):
        context = changes.Context(target, backend, getpass.getuser())
        made, more, refused = changes.apply_entry_points(points, job, context)
        if made.target != job.target:
            raise BadRequest("the policy of an installed package moves the job to another target", "it may refuse it")
        job, notes = made, notes + more
    return Governed(job, job.options.get(backend, {}), policies, notes, points, refused)


def check_stored(plan: Plan, backend: Backend, home: Path, folder: Path | None = None) -> Plan:
    """Return a plan that was made earlier, checked against the policies of now; blocking: reads files.

    The policies are those that it was planned under, and those of a folder and of its source.

    Raises:
        Refused: a rule refuses it, or a policy would change its job.
        BadPolicy: a policy cannot be used.
    """
    from cloudtrain.job.job import Job

    job = plan.job
    folders = folders_of(folder, str(job["source"]), job.get("entrypoint")) if folder else []
    policies, notes = find(folders, home, plan.policies)
    refused = checks.find_problems(policies, plan, backend)
    for policy in policies:
        refused += changes.missing_settings([policy], plan.target, plan.backend, plan.job)
    if points := installed(GROUP):
        context = changes.Context(plan.target, plan.backend, getpass.getuser())
        _, changed, more = changes.apply_entry_points(points, Job.from_dict(plan.job), context)
        refused += more
        refused += [Problem(f"{text}: the plan was made without it", hint="make the plan again") for text in changed]
    if refused:
        raise checks.Refused(refused)
    return replace(plan, policies=_kept(policies, points), notes=(*plan.notes, *notes))
