"""cloudtrain fetch: download a run's model, outputs and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cloudtrain.backends.api import FETCHABLE, WORKDIR
from cloudtrain.cli.view import options, runs, summary, terminal
from cloudtrain.errors import BadRequest
from cloudtrain.job.units import format_size

RESULT_VARIABLES = {  # where a script writes its results
    "model": "$CLOUDTRAIN_MODEL_DIR",
    "outputs": "$CLOUDTRAIN_OUTPUT_DIR",
    "checkpoints": "$CLOUDTRAIN_CHECKPOINT_DIR",
    WORKDIR: "its working directory",
}


@options.command()
@options.run_or_newest
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    type=click.Path(),
    help="Folder that gets model/, outputs/ and checkpoints/; by default one with the run's id as its name, here.",
)
@click.option(
    "--what",
    multiple=True,
    type=click.Choice((*FETCHABLE, WORKDIR)),
    help="Copy only this part; may be repeated. workdir: the script's working directory, of runs on the backend local.",
)
@options.json_option
def command(run_id: str | None, output: str | None, what: tuple[str, ...], as_json: bool) -> int:
    """Copy a run's model, outputs and checkpoints into a folder.

    The folder gets model/, outputs/ and checkpoints/, or the parts that --what names. It then belongs to this run:
    another run's files are refused there (exit code 2). Of a run that is still running you get the files that exist so
    far. Files that are already there and unchanged are not copied again. Exceptions are local targets and SageMaker's
    archives of model/ and outputs/: there every fetch copies all files. An interrupted fetch continues when you repeat
    it. The exit code is 1 when an ended run has no files.

    \b
    cloudtrain fetch
    cloudtrain fetch tiny-lm-261125 -o out/ --what model
    """
    if output and os.path.lexists(output) and not Path(output).is_dir():
        raise BadRequest(f"{output} is not a folder", "choose another folder with -o")
    run = runs.find(run_id)
    destination = Path(output or run.run_id)
    status = run.refresh()
    run.fetch(destination, what or FETCHABLE)
    fetched = {name: _count_files(destination / name) for name in (what or FETCHABLE)}
    if as_json:
        folders = {name: {"files": files, "size_bytes": size} for name, (files, size) in fetched.items()}
        terminal.print_json({"run_id": run.run_id, "into": str(destination), "state": status.state.value, **folders})
        return int(status.state.final and not any(files for files, _ in fetched.values()))
    for name, (files, size) in fetched.items():
        if files:
            terminal.print_lines(f"{destination / name}  {files} file{'s' * (files != 1)}, {format_size(size)}")
    nothing = not any(files for files, _ in fetched.values())
    if nothing:
        terminal.note(f"{run.run_id} has stored no {' or '.join(fetched)}" + ("" if status.state.final else " yet"))
        terminal.note(
            f"  cloudtrain keeps what a script writes to {', '.join(RESULT_VARIABLES[name] for name in fetched)}"
        )
        for text in summary.remarks(run, "not_kept"):
            terminal.note(f"  {text}")
        for text in summary.workdir_command(run):
            terminal.note(f"  {text}")
    elif not status.state.final:
        terminal.note(f"{run.run_id} is still {status.state}: only files that exist so far were copied")
    return int(nothing and status.state.final)


def _count_files(folder: Path) -> tuple[int, int]:
    """Return the number of files below a folder and their size in bytes."""
    count = size = 0
    for directory, _, names in os.walk(folder):
        count += len(names)
        size += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)  # noqa: PTH118
    return count, size
