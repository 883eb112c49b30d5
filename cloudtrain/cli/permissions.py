"""cloudtrain permissions: print the least permissions that a target needs, and what enforces the policy there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BadRequest, page


@options.command()
@options.target_option_with(
    "Print the permissions for this target of cloudtrain.toml, or this backend. Default: the target of --job. "
    "Without both, the command is refused."
)
@click.option(
    "--job",
    metavar="JOB",
    type=click.Path(),
    help="Print what this job file needs on its target, its inputs, output and secrets included.",
)
@click.option(
    "--policy",
    is_flag=True,
    help="Also print a document with which the platform itself refuses what the rules of your policy.toml refuse.",
)
@click.option(
    "--inside",
    is_flag=True,
    help="Also allow what `cloudtrain exec`, `stack` and `forward` need on Kubernetes. Whoever has that can read the secrets of "
    "all jobs in the namespace. It adds nothing on other platforms.",
)
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Write each document to a file of this folder.")
@options.json_option
def command(target: str | None, job: str | None, policy: bool, inside: bool, output: str | None, as_json: bool) -> int:
    """Print the least permissions that a target needs.

    For SageMaker it prints IAM policies for the job's role and for the user who submits, for Kubernetes a Role, and
    for Vertex AI a custom role and bindings. They allow what the options of the target need and nothing else.
    --policy adds an IAM policy (SageMaker), a ValidatingAdmissionPolicy (Kubernetes) or an organization policy of
    regions (Vertex AI). The command needs no network and no login.

    \b
    cloudtrain permissions -t prod --policy
    cloudtrain permissions -t cluster | kubectl apply -f -
    cloudtrain permissions -t cluster --inside
    """
    documents, notes = _documents(target, job, policy, inside)
    if output:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            (folder / name).write_text(_text(name, document), "utf-8")
        terminal.print_lines(*(str(folder / name) for name in documents))
    elif as_json:
        terminal.print_json({"documents": documents, "notes": notes}, indent=2)
    else:
        for name, document in documents.items():
            terminal.print_lines(f"# {name}", *_text(name, document).rstrip("\n").splitlines())
    for note in notes if not as_json else ():
        terminal.note(note)
    return 0


def _documents(target: str | None, job: str | None, policy: bool, inside: bool) -> tuple[dict[str, Any], list[str]]:
    from cloudtrain.backends import registry
    from cloudtrain.job import targets
    from cloudtrain.policy import apply, enforce
    from cloudtrain.runs.planning.plan import Planner

    home = targets.home()
    plan = Planner(target).plan(job) if job else None
    named = targets.named_targets().get(target or "")
    name = plan.target or plan.backend if plan else target or registry.DEFAULT
    kind = plan.backend if plan else named.backend if named else name
    given: Mapping[str, Any] = {}
    if plan:
        given = (plan.job.get("options") or {}).get(kind) or {}
    elif named:
        given = named.options.value
    backend = registry.create(kind, given, home)
    documents = dict(backend.permissions(plan, inside=inside))
    said = []
    if inside and documents == dict(backend.permissions(plan)):
        said = [f"--inside adds nothing on {kind}, where the options of the job switch shells on: {page('how/inside')}"]
    if not policy:
        return documents, said
    policies, notes = apply.find([Path.cwd()], home)
    if not policies:
        raise BadRequest(
            "no policy.toml applies on this machine", "write a policy.toml, or run the command without --policy"
        )
    more, cannot = enforce.build(policies, name, backend)
    if plan is None and any(each.key == "output" for each in enforce.requirements(policies, name, backend.name)):
        said.append("the role may not write to the output that the rules require: --job FILE adds the output of a job")
    return documents | more, said + notes + cannot


def _text(name: str, document: Any) -> str:
    if name.endswith(".json"):
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    import yaml

    return "".join(f"---\n{yaml.safe_dump(each, sort_keys=False, width=1000)}" for each in document)
