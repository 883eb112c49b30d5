"""cloudtrain doctor: check this machine and a target for problems before a submit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BadRequest, CloudtrainError, install_command
from cloudtrain.job.units import format_count, format_size

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend

FREE_BYTES = 1 << 30


class Finding(NamedTuple):
    """The outcome of one check."""

    what: str
    ok: bool | None  # None: information, neither good nor bad
    message: str
    hint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as `doctor --json` prints it."""
        return {"what": self.what, "ok": self.ok, "said": self.message, "hint": self.hint}


@options.command()
@options.argument(
    "target",
    "[TARGET]",
    "A backend (local, sagemaker, ...) or a target of cloudtrain.toml. Default: the target of --job, else local.",
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
@options.json_option
def command(target: str | None, more: tuple[str, ...], job: str | None, policy: str | None, as_json: bool) -> int:
    """Check this machine and a target for problems.

    It always checks this machine (Python, git, disk, history, policies), and then TARGET and each -t: their login,
    options and permissions. Without TARGET and -t it checks the default target. No job of yours is submitted; on
    Slurm `srun` runs `cat` on a free node. The policies that cloudtrain.toml names are downloaded and pinned. Runs
    that the history has lost are added to it again. The exit code is 1 when a check fails.

    \b
    cloudtrain doctor -t cluster -t pair --job job.yaml
    cloudtrain doctor prod --job job.yaml --policy role
    """
    names = dict.fromkeys([*([target] if target else []), *more])
    if policy:
        for named in names or [None]:
            terminal.print_json(_policy(policy, named, job), indent=2)
        return 0
    all_findings = [*_check_machine(), *_check_policies()]
    for name in names or [_target_of(job) if job else "local"]:
        all_findings += _check_target(name, {})
        all_findings += _check_job(job, name) if job else ()
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


def findings(target: str, options: Mapping[str, Any] | None = None) -> Iterator[Finding]:
    """Check this machine and then a target, and yield every finding; blocking, also on the network.

    `options` override the target's own. Raises UnknownBackend, MissingExtra, BadRequest.
    """
    yield from _check_machine()
    yield from _check_target(target, options or {})


def _check_machine() -> Iterator[Finding]:
    from cloudtrain.__about__ import __version__
    from cloudtrain.job import targets

    yield Finding("cloudtrain", True, f"{__version__}, in {Path(__file__).parents[1]}")
    fits = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        fits,
        f"{sys.version.split()[0]}, {sys.executable}",
        "" if fits else "cloudtrain needs Python 3.11 or newer",
    )
    yield _check_git()
    home = targets.home()
    yield _check_disk(home)
    yield _check_history(home)
    for package, extra in (("torch", "train"), ("accelerate", "train"), ("transformers", "train")):
        yield _check_package(package, extra)
    gpus = sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*")) if sys.platform == "linux" else []
    yield Finding("accelerators", None, f"{len(gpus)} NVIDIA" if gpus else f"none; {os.cpu_count()} CPUs")


def _check_policies() -> Iterator[Finding]:
    """Fetch and pin the organisation's policies that the configuration here names, and read those beside it."""
    from cloudtrain.job import targets
    from cloudtrain.policy import changes, files, find, pin

    here = Path.cwd()
    try:
        addresses = find.configured(here)
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
    for path in targets.config_files(here, files.POLICY_FILE):
        try:
            policy = files.read(path)
        except CloudtrainError as error:
            yield Finding("policy", False, error.message, error.hint)
        else:
            yield Finding("policy", True, f"{path}: {format_count(len(policy.rules), 'rule')}")
    for point in changes.entry_points():
        yield Finding("policy", None, f"{point.name}, installed: {point.value}")


def _check_git() -> Finding:
    import subprocess

    git = shutil.which("git")
    if git is None:
        return Finding("git", False, "not found", "install git: cloudtrain uses it to decide which files to package")
    completed = subprocess.run([git, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return Finding("git", completed.returncode == 0, completed.stdout.strip() or completed.stderr.strip())


def _check_disk(home: Path) -> Finding:
    parent = next((folder for folder in (home, *home.parents) if folder.exists()), Path("/"))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return Finding("home", False, f"{home} cannot be written", "set CLOUDTRAIN_HOME")
    free = shutil.disk_usage(parent).free
    hint = "" if free >= FREE_BYTES else "less than 1 GiB: free some space or set CLOUDTRAIN_HOME"
    return Finding("home", free >= FREE_BYTES, f"{home}, {format_size(free)} free", hint)


def _check_history(home: Path) -> Finding:
    if not (home / "history.sqlite3").exists():
        return Finding("history", None, "none yet")
    from cloudtrain.history.store import Store

    store = Store(home)
    try:
        store.check()
        count = len(store.names())
    except CloudtrainError as error:
        return Finding("history", False, error.message, error.hint)
    warnings = store.warnings
    return Finding("history", not warnings, "; ".join([f"{count} run{'s' * (count != 1)}", *warnings]))


def _check_package(package: str, extra: str) -> Finding:
    """Check the version of a package without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Finding(package, True, version(package))
    except PackageNotFoundError:
        return Finding(
            package, None, "not installed", f"{install_command(f'cloudtrain[{extra}]')} for the shared trainer on local"
        )


def _check_target(name: str, options: Mapping[str, Any]) -> Iterator[Finding]:
    from cloudtrain.backends.api import HasCapacity, HasMachineChecks
    from cloudtrain.job import targets

    instance, kind, instance_options = _create(name, options)
    wrong = []
    if instance_options:  # only then pydantic is loaded
        from cloudtrain.runs.plan import find_invalid

        wrong = find_invalid(instance_options, type(instance), instance.name, name if kind == "target" else "")
    unknown = [problem for problem in wrong if problem.message.startswith("is not a known key")]  # what `plan` refuses
    problems = [*unknown, *instance.check()]
    subject = f"{kind} {name}"
    for machine, found in instance.checked_machines().items() if isinstance(instance, HasMachineChecks) else ():
        yield Finding(f"machine {machine}", None, found)
    for problem in problems:
        path = f"{problem.path}: " if problem.path else ""
        yield Finding(subject, False, path + problem.message, problem.hint)
    if not problems:
        yield Finding(subject, True, "ready" + (f", backend {instance.name}" if kind == "target" else ""))
        if isinstance(instance, HasCapacity):
            yield Finding("GPUs there", None, instance.capacity())
    if (targets.home() / targets.HOME_FILE).exists() and not any(problem.path for problem in problems):
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
    options = {**target.options.value, **options}
    return registry.create(target.backend, options, targets.home()), "target", options


def _policy(kind: str, name: str | None, job: str | None) -> Mapping[str, Any]:
    from cloudtrain.backends import registry
    from cloudtrain.backends.api import HasPermissions, HasPolicies
    from cloudtrain.job import targets
    from cloudtrain.runs.plan import Planner

    plan = Planner(name).plan(job) if job else None
    backend = registry.create_for(plan, targets.home()) if plan else _create(name or "local", {})[0]
    if not isinstance(backend, HasPolicies):
        hint = "choose a SageMaker target: -t TARGET"
        if isinstance(backend, HasPermissions):
            hint = f"cloudtrain permissions -t {name or 'TARGET'} prints what {backend.name} needs"
        raise BadRequest(f"the backend {backend.name} has no IAM policies to print", hint)
    return backend.policy(kind, plan)


def _target_of(path: str) -> str:
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    return targets.resolve(Path(path), backends=registry.names()).target


def _check_job(path: str, target: str) -> Iterator[Finding]:
    """Ask a target's platform whether it would start a job, with the limits of the job itself."""
    from cloudtrain.backends import registry
    from cloudtrain.backends.api import HasProbe
    from cloudtrain.cli.plan import describe_refusal
    from cloudtrain.job import targets
    from cloudtrain.runs.plan import Planner

    plan = Planner(target).plan(path)
    if refusal := describe_refusal(plan):
        yield Finding(f"job {path}", False, f"submit would refuse it here: {refusal}")
        return
    backend = registry.create_for(plan, targets.home())
    problems = backend.probe(plan) if isinstance(backend, HasProbe) else []
    for problem in problems:
        yield Finding(f"job {path}", False, problem.message, problem.hint)
    if not problems:
        yield Finding(f"job {path}", True if isinstance(backend, HasProbe) else None, f"planned on {target}")
