"""cloudtrain doctor: check this machine and a target for problems before a submit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.cli.view.machine_checks import Finding, check_machine, find_config_problems
from cloudtrain.errors import BackendError, CloudtrainError, Problem
from cloudtrain.job import providers
from cloudtrain.job.units import format_count

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend


@options.command()
@options.argument(
    "target",
    "[TARGET]",
    f"{providers.WHERE.capitalize()}. Default: the target of --job, else that of [defaults], else {providers.DEFAULT_TARGET}.",
    shell_complete=options.complete_targets,
)
@click.option(
    "-t",
    "--target",
    "more",
    metavar="TARGET",
    multiple=True,
    shell_complete=options.complete_targets,
    help="Check this backend or target too, as the argument TARGET does; may be repeated.",
)
@click.option(
    "--job",
    metavar="JOB",
    type=click.Path(),
    help="Also ask the platform of each target whether it would accept this job file. Nothing is started.",
)
@click.option(
    "--policy",
    type=click.Choice(("trust", "role", "submit")),
    help="Print an AWS IAM policy and check nothing: `trust` (who may take the role of the job), `role` (what that role may do), "
    "`submit` (what the user may do). "
    "With --job, the policy has what that job needs and nothing else.",
)
@click.option("--nodes", is_flag=True, help="List the nodes whose hardware failed in the last 7 days; check nothing.")
@click.option("--clear", metavar="NODE", help="With --nodes: use this node again.")
@options.json_option
def command(
    target: str | None,
    more: tuple[str, ...],
    job: str | None,
    policy: str | None,
    nodes: bool,
    clear: str | None,
    as_json: bool,
) -> int:
    """Check this machine and a target for problems.

    It always checks this machine (Python, git, disk, history, policies) and cloudtrain.toml, and then TARGET and each
    -t: their login, options and permissions. No job of yours is submitted. On Slurm `srun` runs `cat` on a free node,
    at most one minute that the account may be charged for. The policies that cloudtrain.toml names are downloaded and
    pinned. Runs on the target's platform that the history has lost are added to it again; cloudtrain never retries
    these. The exit code is 1 when a check fails.

    \b
    cloudtrain doctor -t cluster -t pair --job job.yaml
    cloudtrain doctor prod --job job.yaml --policy role
    """
    if clear and not nodes:
        raise click.UsageError("--clear needs --nodes")
    if nodes:
        return _print_nodes(clear, as_json)
    names = dict.fromkeys([*([target] if target else []), *more])
    if policy:
        for named in names or [None]:
            terminal.print_json(_policy(policy, named, job), indent=2)
        return 0
    wrong = find_config_problems(Path.cwd())
    all_findings = [*check_machine(), *_config_findings(wrong)]
    all_findings += () if "" in wrong else (*_check_policies(), *_check_notify())
    for name in names or _usual_targets(job if "" not in wrong else None, wrong):
        all_findings += _check_here(name, job, wrong)
    all_findings = list(dict.fromkeys(all_findings))  # several checks may end at the same missing login
    problems = [finding for finding in all_findings if finding.ok is False]
    if as_json:
        terminal.print_json([finding.to_dict() for finding in all_findings], indent=2)
    else:
        marks = {True: "ok", False: "PROBLEM", None: "-"}
        rows = [(marks[f.ok], f.what, f.message + (f" ({f.hint})" if f.hint else "")) for f in all_findings]
        terminal.print_table(("", "what", "found"), rows, styles={"ok": "green", "PROBLEM": "bold red"})
        terminal.print_lines(
            "",
            f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "all checks passed",
        )
    return 1 if problems else 0


def _print_nodes(clear: str | None, as_json: bool) -> int:
    """Print the nodes that later attempts avoid, or use one again. Return 1 where a node to clear is not among them."""
    from cloudtrain.history.store import Store
    from cloudtrain.job.targets import home
    from cloudtrain.job.units import format_duration, seconds_since
    from cloudtrain.runs.planning import bad_nodes

    store = Store(home())
    if clear and not bad_nodes.clear(store, clear):
        terminal.note(f"no node {clear} is avoided; cloudtrain doctor --nodes lists them")
        return 1
    found = bad_nodes.bad_nodes(store)
    if as_json:
        terminal.print_json([node._asdict() for node in found], indent=2)
        return 0
    rows = [
        (node.target, node.name, format_duration(seconds_since(node.at, store.clock)), node.attempt_id, node.why)
        for node in found
    ]
    if rows:
        terminal.print_table(("target", "node", "ago", "attempt", "why"), rows)
    terminal.note(
        "later attempts avoid them on Slurm, Kubernetes and ssh; SageMaker and Vertex AI give no choice of machines"
        if rows
        else "no node has failed in the last 7 days"
    )
    return 0


def findings(target: str, options: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Check this machine and then a target, and yield every finding; blocking, also on the network.

    `options` override the target's own. Raises UnknownBackend, MissingExtra, BadRequest.
    """
    yield from check_machine()
    yield from _check_target(target, options or {})


def _check_policies() -> Iterator[Finding]:
    """Fetch and pin the organisation's policies that the configuration here names, and read those beside it."""
    from cloudtrain.backends.registry import installed
    from cloudtrain.job import targets
    from cloudtrain.policy import apply, files, names, pin

    def unknown(policy: files.Policy) -> Iterator[Finding]:
        try:
            found = names.check([policy], targets.named_targets(here))
        except CloudtrainError as error:
            yield Finding("policy", False, error.message, error.hint)
        else:
            yield from (Finding("policy", False, sentence, "correct the name") for sentence in found)

    here = Path.cwd()
    try:
        addresses = apply.configured(here)
    except CloudtrainError as error:
        yield Finding("policy", False, error.message, error.hint)
        return
    for url, sha256 in addresses.items():
        try:
            policy = pin.pin(url, targets.home(), sha256)
        except CloudtrainError as error:
            yield Finding("policy", False, error.message, error.hint)
        else:
            yield Finding(
                "policy",
                True,
                f"{url}: {format_count(len(policy.rules), 'rule')}, sha256 {policy.sha256[:12]}, pinned now",
            )
            yield from unknown(policy)
    for path in targets.config_files(here, files.POLICY_FILE):
        try:
            policy = files.read(path)
        except CloudtrainError as error:
            yield Finding("policy", False, error.message, error.hint)
        else:
            yield Finding("policy", True, f"{path}: {format_count(len(policy.rules), 'rule')}")
            yield from unknown(policy)
    for point in installed(apply.GROUP):
        yield Finding("policy", None, f"{point.name}, installed: {point.value}")


def _check_notify() -> Iterator[Finding]:
    """Say whether this shell has the address that notifications are posted to."""
    from cloudtrain.job import targets
    from cloudtrain.report import notify

    scheme, _, name = str(notify.settings(targets.config_files(Path.cwd())).get("webhook") or "").partition(":")
    if scheme == "env" and os.environ.get(name):
        yield Finding("notify", True, f"the webhook's address is in {name}")
    elif scheme == "env":
        yield Finding("notify", False, f"{name} is not set, so nothing is posted", "set it where you submit")


def _config_findings(wrong: Mapping[str, Sequence[Problem]]) -> Iterator[Finding]:
    for name, problems in wrong.items():
        for problem in problems:
            message = str(replace(problem, hint=""))
            yield Finding(f"target {name}" if name else "config", False, message, problem.hint)


def _check_here(name: str, job: str | None, wrong: Mapping[str, Sequence[Problem]]) -> Iterator[Finding]:
    """Check a target and a job on it; `wrong` is what is already reported of cloudtrain.toml."""
    from cloudtrain.job import targets

    if "" in wrong or not all(map(_is_unknown, wrong.get(name, ()))):
        yield Finding(f"target {name}", None, "not checked, because of what is wrong in cloudtrain.toml")
        return
    try:
        yield from _check_target(name, {}, reported=name in wrong)
        yield from _check_job(job, name) if job else ()
    except BackendError as error:  # the other targets are checked all the same
        what = "target" if name in targets.named_targets() else "backend"
        yield Finding(f"{what} {name}", False, error.message, error.hint)


def _is_unknown(problem: Problem) -> bool:
    return problem.message.startswith("is not a known key")


def _check_target(name: str, options: Mapping[str, Any], reported: bool = False) -> Iterator[Finding]:
    """Check a target with `options` over its own; `reported`: its unknown options were found in cloudtrain.toml."""
    from cloudtrain.job import homes, targets

    instance, kind, instance_options = _create(name, options)
    wrong = []
    if instance_options and not reported:  # only then pydantic is loaded
        from cloudtrain.runs.planning.plan import find_invalid

        wrong = find_invalid(instance_options, type(instance), instance.name, name if kind == "target" else "")
    problems = [*filter(_is_unknown, wrong), *instance.check()]  # of the first, what `plan` refuses
    subject = f"{kind} {name}"
    for machine, found in instance.checked_machines().items():
        yield Finding(f"machine {machine}", None, found)
    for problem in problems:
        path = f"{problem.path}: " if problem.path else ""
        yield Finding(subject, False, path + problem.message, problem.hint)
    if not problems and not reported:
        yield Finding(subject, True, "ready" + (f", backend {instance.name}" if kind == "target" else ""))
        if capacity := instance.capacity():
            yield Finding("GPUs there", None, capacity)
    if (targets.home() / homes.HOME_FILE).exists() and not any(problem.path for problem in problems):
        yield from _find_runs(instance, instance_options)


def _find_runs(instance: Backend, options: Mapping[str, Any]) -> Iterator[Finding]:
    """Add the runs of this home that the history has lost and the target's platform lists by their label."""
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    try:
        count = Store(targets.home()).find_labelled(instance, options)
    except CloudtrainError as error:
        yield Finding("runs there", None, f"cloudtrain cannot list them: {error.message}", error.hint)
        return
    if count:
        runs = "1 run was" if count == 1 else f"{count} runs were"
        yield Finding("runs there", True, f"{runs} missing in the history and added again: `cloudtrain ls` shows them")


def _create(name: str, options: Mapping[str, Any]) -> tuple[Backend, str, Mapping[str, Any]]:
    """Return a backend, what its name is (target or backend), and its options; `options` override a target's own."""
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    target = targets.named_targets().get(name)
    if target is None:
        return registry.create(name, options, targets.home()), "backend", options
    options = {**targets.options_of(target), **options}
    return registry.create(target.backend, options, targets.home()), "target", options


def _policy(kind: str, name: str | None, job: str | None) -> Mapping[str, Any]:
    from cloudtrain.backends import registry
    from cloudtrain.job import targets
    from cloudtrain.runs.planning.plan import Planner

    plan = Planner(name).plan(job) if job else None
    backend = registry.create_for(plan, targets.home()) if plan else _create(name or registry.DEFAULT, {})[0]
    return backend.policy(kind, plan)


def _usual_targets(job: str | None, wrong: Mapping[str, Sequence[Problem]]) -> list[str]:
    """Return the target of a job file, else those that the configuration gives jobs here, else the default."""
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    if job:
        return [targets.resolve(Path(job), backends=registry.names()).target]
    named = None if "" in wrong else targets.default_target(Path.cwd())
    return [named] if isinstance(named, str) else [*(named or [registry.DEFAULT])]


def _check_job(path: str, target: str) -> Iterator[Finding]:
    """Ask a target's platform whether it would start a job, with the limits of the job itself."""
    from cloudtrain.backends import registry
    from cloudtrain.cli.plan import describe_refusal
    from cloudtrain.job import targets
    from cloudtrain.runs.planning.plan import Planner

    plan = Planner(target).plan(path)
    if refusal := describe_refusal(plan):
        yield Finding(f"job {path}", False, f"submit would refuse it here: {refusal}")
        return
    backend = registry.create_for(plan, targets.home())
    problems = backend.probe(plan)
    for problem in problems or ():
        yield Finding(f"job {path}", False, problem.message, problem.hint)
    if not problems:
        yield Finding(f"job {path}", None if problems is None else True, f"planned on {target}")
