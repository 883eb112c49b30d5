"""cloudtrain plan: show what a submit would send (dry run), or which files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import options, terminal
from cloudtrain.cli.view.jobs import JOB_FILES, JobInput, parse_job_words
from cloudtrain.cli.view.planned import print_manifest, print_plan, shorten, take_out_texts
from cloudtrain.errors import BadRequest, BadSource
from cloudtrain.job.units import format_count, format_size

if TYPE_CHECKING:
    from cloudtrain.source.files import File


@options.command()
@options.job_options
@click.option(
    "--key", metavar="KEY", help="Plan the run that `submit --key KEY` would start: its id is made from the key."
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(), help="Write the plan to a file that `submit` accepts."
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole plan as JSON.")
@options.force_option
@click.option("--request", is_flag=True, help="Print the request to the platform, too.")
@options.verbose_option
@click.option(
    "--manifests",
    is_flag=True,
    help="Print manifests for `kubectl apply --server-side -f -` (Kubernetes), or the SDL (Akash).",
)
@click.option(
    "--files",
    "--list",
    "list_files",
    is_flag=True,
    help="List only the files that would be packaged; with sizes. JOB may be a folder.",
)
@click.option("--why", metavar="FILE", help="Print only why this file is packaged, or why it is not.")
def command(
    words: options.JobWords,
    target: str | None,
    key: str | None,
    output: str | None,
    as_json: bool,
    force: bool,
    request: bool,
    verbose: bool,
    manifests: bool,
    list_files: bool,
    why: str | None,
) -> int:
    """Print what would be submitted, and submit nothing.

    It packages the source and builds the exact request for the platform, without network, credentials or SDK. Only
    a `source` at a git address is downloaded. Prices are those of the stored price list (`cloudtrain prices`). The
    five most important notes are printed, with --verbose all notes and the request. With -o it writes the plan to a
    file; `cloudtrain submit plan.json` then sends it, unchanged. The file has the digest of the source, not its files.
    submit sends the package that this command stored; files that you change later are not in it. Where that package
    was deleted, submit packages the folder again and refuses a changed source (exit code 2).

    In a git repository, all files are packaged that git does not ignore, new files too; elsewhere all files that no
    .gitignore excludes. Files that .cloudtrainignore excludes never are. Credentials, Git-LFS pointers and files that
    are too large are refused, unless the job file allows them by allow_secrets, allow_pointers or allow_large.

    The exit code is 2 when the job, source or target is wrong, or a policy refuses the job. It is 2 too when a job
    of the shared trainer does not fit on its GPUs. It is 0 when only this machine lacks what the job needs, such as
    a GPU for the target local: plan then prints that submit would refuse the job here.

    \b
    cloudtrain plan                      the job.yaml here
    cloudtrain plan job.yaml -t prod --request
    cloudtrain plan train.py --json -- --lr 1e-4
    cloudtrain plan --files
    cloudtrain plan src --why data/big.bin
    """
    if list_files or why is not None:
        return _print_files(words, why, as_json)
    plan, files = _make_plan(parse_job_words(words), target, key, force)
    if output and output != "-":
        Path(output).write_text(plan.to_json(), "utf-8")
    if manifests:
        _print_manifests(plan)
        return 0
    if as_json or output == "-":
        sys.stdout.write(plan.to_json())
        return 0
    refusal = describe_refusal(plan)
    rows = [("submit", f"would refuse this here: {refusal}")] if refusal else []
    rows += _budget_rows(plan, files)
    rows += [("written", output or ""), ("next", "" if refusal else _describe_submit(output))]
    print_plan(plan, verbose=verbose, more=rows)
    if verbose:
        print_manifest(plan)
    if verbose or request:
        _print_request(plan.request, verbose)
    return 0


# -- the files --------------------------------------------------------------------------------------------------------


def _print_files(words: options.JobWords, why: str | None, as_json: bool) -> int:
    """Print the files of a source, or why one of them is packaged or not; returns the exit code."""
    from cloudtrain.job import homes, targets
    from cloudtrain.source import bundle as source

    folder, trainer, allowed = _resolve_source(words)
    if why is not None:
        explanation = source.why(folder, why, **allowed)
        if as_json:
            terminal.print_json({"path": why, "why": explanation})
        else:
            terminal.print_lines(explanation)
        return 0
    try:
        with suppress(OSError):  # Bundle.make says what is wrong
            homes.make_home(targets.home())
        bundle = source.Bundle.make(folder, targets.home() / "bundles", trainer=trainer, **allowed)
    except BadSource:
        if not as_json:  # the whole list helps to fix what was refused
            _print_list(source.list_files(folder))
        raise
    if as_json:
        listed = [{"path": file.path, "size": file.size} for file in bundle.files]
        terminal.print_json({**bundle.to_dict(), "source": bundle.source, "files": listed})
        return 0
    _print_list(bundle.files)
    size = format_size(sum(file.size for file in bundle.files))
    packed = f"{format_count(len(bundle.files), 'file')}, {size}, {format_size(bundle.size_bytes)} packed"
    terminal.print_lines(f"{bundle.source}  {packed}")
    commit = bundle.commit and bundle.commit + (" with changes" if bundle.dirty else "")
    terminal.print_pairs([("sha256", bundle.sha256), ("commit", commit or ""), ("archive", str(bundle.path))])
    return 0


def _print_list(files: Sequence[File]) -> None:
    for file in files:
        terminal.print_lines(f"{file.size:>12,}  {file.path}")


def _resolve_source(words: options.JobWords) -> tuple[Path, bool, dict[str, list[str]]]:
    """Return the source folder, whether the shared trainer goes along, and the exceptions that the job allows.

    Raises BadRequest where there is no folder.
    """
    path = Path(words.job or ".")
    if path.is_dir() and (words.job or not any(Path(name).is_file() for name in JOB_FILES)):
        return path, False, {}
    if words.job and not path.suffix and not path.exists():
        raise BadRequest(f"there is no file or folder {path}", "give a folder, a job file or a script")
    job_input = parse_job_words(words)
    if isinstance(job_input, Plan):
        raise BadRequest("the files of a plan are packaged already", "give a folder or a job file")
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    job = targets.resolve(job_input.job, job_input.sets, backends=registry.names()).job
    if "://" in job.source:
        raise BadRequest(f"the source is not a folder: {job.source}", "run cloudtrain plan to see its commit and files")
    return Path(job.source), job.runs_trainer, job.exceptions


# -- the plan ---------------------------------------------------------------------------------------------------------


def describe_refusal(plan: Plan) -> str:
    """Return why a submit from this machine would refuse a plan, as it would say it; "" where it would not, and on a platform."""
    from cloudtrain.backends import registry
    from cloudtrain.errors import BadJob
    from cloudtrain.job import targets

    backend = registry.create_for(plan, targets.home())
    if not backend.traits.own_machines:
        return ""  # its preflight needs credentials, and a plan none
    try:
        backend.preflight(plan)
    except BadJob as error:
        return "; ".join(str(problem) for problem in error.problems)
    except BadRequest as error:
        return str(error)
    return ""


def _describe_submit(output: str | None) -> str:
    """Return the command that submits the plan: of its file, else the words of this command."""
    import shlex

    words: list[str] = [output] if output else click.get_current_context().meta[options.WORDS]
    at = words.index("--") if "--" in words else len(words)
    own = [word for word in words[:at] if word not in ("--request", "--verbose")]
    return shlex.join(["cloudtrain", "submit", *own, *words[at:]])


def _print_request(request: Mapping[str, Any], verbose: bool) -> None:
    import json

    shown, hidden = (request, 0) if verbose else shorten(request)
    texts: dict[str, str] = {}
    if verbose:
        shown, texts = take_out_texts(request)
    left_out = f" (--verbose has {hidden} more value{'s' * (hidden != 1)}: the launcher's variables, long texts)"
    terminal.print_lines("", f"request{left_out if hidden else ''}:")
    terminal.print_coloured_json(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")
    for path, text in texts.items():
        terminal.print_lines("", f"{path} of the request:", *text.splitlines())


def _budget_rows(plan: Plan, files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return what a submit from this machine would say of the budgets in cloudtrain.toml."""
    from cloudtrain.errors import OverBudget
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets
    from cloudtrain.runs.planning import budgets

    questions: list[str] = []
    try:
        notes = budgets.check(Store(targets.home()), plan, files, questions.append) if files else []
    except OverBudget as error:
        spent = error.message.removesuffix(budgets.REFUSED)
        return [("submit", f"would refuse this here: {spent} ({error.hint})")]
    asks = [("submit", f"would ask first: {question}") for question in questions]
    return [*(("submit", f"would warn: {note}") for note in notes), *asks]


def _make_plan(
    job_input: JobInput | Plan, target: str | None, key: str | None, force: bool
) -> tuple[Plan, Sequence[Path]]:
    """Return the plan, and the configuration files that hold for it."""
    from cloudtrain.runs.planning.plan import Planner

    planner = Planner(target, force=force)
    if isinstance(job_input, Plan):
        return job_input, planner.config_files
    return planner.plan(job_input.job, sets=job_input.sets, key=key), planner.config_files


def _print_manifests(plan: Plan) -> None:
    """Print a plan's manifests, the source included, for the platform's own tool (kubectl)."""
    from cloudtrain.job import targets
    from cloudtrain.runs.planning import attempts

    home = targets.home()
    backend = attempts.backend_of(plan, home)
    sys.stdout.write(backend.manifests(plan, attempts.stored_bundle(plan, home).path.read_bytes()))
