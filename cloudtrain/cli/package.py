"""cloudtrain package: show which files of a source would be packaged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain.backends.api import Plan
from cloudtrain.cli.view import options, terminal
from cloudtrain.cli.view.jobs import JOB_FILES, parse_job_words
from cloudtrain.errors import BadRequest, BadSource
from cloudtrain.job.units import format_size

if TYPE_CHECKING:
    from cloudtrain.source.files import File


@options.command()
@options.argument(
    "source",
    "[DIR|JOB|SCRIPT]",
    "A source folder, or a job file or script, whose source is shown. Default: job.yaml in this folder, else this folder.",
    type=click.Path(),
)
@click.option("--list", "as_list", is_flag=True, help="List every file with its size.")
@click.option("--why", metavar="FILE", help="Print why this file is packaged, or why it is not.")
@options.json_option
def command(source: str | None, as_list: bool, why: str | None, as_json: bool) -> int:
    """Show how much of a source would be packaged, or which files.

    Without --list only the number of files, sizes, digest and commit are printed. The archive is written to
    `bundles/` of cloudtrain's home (CLOUDTRAIN_HOME, default ~/.local/share/cloudtrain), and nothing is uploaded.
    In a git repository, `cloudtrain submit` packages all files that git does not ignore, new files too; elsewhere
    all files that no .gitignore excludes. It never packages files that .cloudtrainignore excludes. Credentials,
    Git-LFS pointers and files that are too large are refused, here and by submit (exit code 2), unless the job file
    allows them by allow_secrets, allow_pointers or allow_large.

    \b
    cloudtrain package --list
    cloudtrain package src --why data/big.bin
    """
    from cloudtrain.job import homes, targets
    from cloudtrain.source.bundle import Bundle, list_files
    from cloudtrain.source.bundle import why as explain

    folder, trainer, allowed = _resolve_source(source)
    if why is not None:
        explanation = explain(folder, why, **allowed)
        if as_json:
            terminal.print_json({"path": why, "why": explanation})
        else:
            terminal.print_lines(explanation)
        return 0
    try:
        with suppress(OSError):  # Bundle.make says what is wrong
            homes.make_home(targets.home())
        bundle = Bundle.make(folder, targets.home() / "bundles", trainer=trainer, **allowed)
    except BadSource:
        if as_list and not as_json:  # the whole list helps to fix what was refused
            _print_files(list_files(folder))
        raise
    size = sum(file.size for file in bundle.files)
    if as_json:
        files = [{"path": file.path, "size": file.size} for file in bundle.files]
        terminal.print_json(
            {"sha256": bundle.sha256, "files": files} if as_list else {**bundle.to_dict(), "source": bundle.source}
        )
        return 0
    if as_list:
        _print_files(bundle.files)
    count = f"{len(bundle.files)} file{'s' * (len(bundle.files) != 1)}"
    terminal.print_lines(f"{bundle.source}  {count}, {format_size(size)}, {format_size(bundle.size_bytes)} packed")
    commit = bundle.commit and bundle.commit + (" with changes" if bundle.dirty else "")
    terminal.print_pairs([("sha256", bundle.sha256), ("commit", commit or ""), ("archive", str(bundle.path))])
    return 0


def _print_files(files: Sequence[File]) -> None:
    for file in files:
        terminal.print_lines(f"{file.size:>12,}  {file.path}")


def _resolve_source(text: str | None) -> tuple[Path, bool, dict[str, list[str]]]:
    """Return the source folder, whether the shared trainer goes along, and the exceptions that the job allows.

    Raises BadRequest where there is no folder.
    """
    path = Path(text or ".")
    if path.is_dir() and (text or not any(Path(name).is_file() for name in JOB_FILES)):
        return path, False, {}
    if text and not path.suffix and not path.exists():
        raise BadRequest(f"there is no file or folder {text}", "give a folder, a job file or a script")
    job_input = parse_job_words(options.JobWords(text))
    if isinstance(job_input, Plan):
        raise BadRequest(
            "package shows the files of a folder or job file, and a plan is packaged already",
            "give a folder or a job file",
        )
    from cloudtrain.backends import registry
    from cloudtrain.job import targets

    job = targets.resolve(job_input.job, job_input.sets, backends=registry.names()).job
    chosen = job.source
    if "://" in chosen:
        raise BadRequest(f"the source is not a folder: {chosen}", "run cloudtrain plan to see its commit and files")
    return Path(chosen), job.runs_trainer, job.exceptions
