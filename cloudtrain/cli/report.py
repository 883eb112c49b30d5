"""cloudtrain report: write a run, or a comparison of several, into one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest, CloudtrainError, UnknownRun
from cloudtrain.job.units import format_size

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


@options.command()
@options.argument(
    "run_ids",
    "[RUN...]",
    f"{options.RUNS} {options.NEWEST} A sweep's id stands for the runs of its trials.",
    nargs=-1,
    shell_complete=options.complete_runs,
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write. Default: RUN.html, or comparison.html for several runs, in this folder.",
)
@options.rank_option
@click.option("--json", "as_json", is_flag=True, help="Print the path and size of the file as JSON.")
def command(run_ids: tuple[str, ...], output: Path | None, rank: int | None, as_json: bool) -> int:
    """Write a report on a run, or a comparison, as one HTML file.

    Of one RUN the file has curves, hardware usage, provenance, job, plan and the logs of all nodes. Of several RUN
    it is a comparison: a curve for each run, labelled with the values in which it differs, and a table of all
    differences. It can be read without network. An older file of that name is replaced. The command needs plotly,
    which the extra cloudtrain[console] installs.

    If you write it into a source folder, the next `cloudtrain submit` packages it too. A file whose name is the id
    of a run with .html is not packaged, nor one that an ignore file excludes.

    \b
    cloudtrain report tiny-lm-261125 -o report.html
    cloudtrain report tiny-lm-261124 tiny-lm-261125 -o comparison.html
    """
    chosen = list({run.run_id: run for run in map(runs.find, _runs_of(run_ids))}.values())
    for run in chosen:
        run.refresh()
    path = output or Path("comparison.html" if len(chosen) > 1 else f"{chosen[0].run_id}.html")
    try:
        if len(chosen) > 1:
            from cloudtrain.report import comparison

            comparison.write(chosen[0].store, [run.run_id for run in chosen], path, rank=rank)
        else:
            chosen[0].report(path, rank=rank)
    except OSError as error:
        raise BadRequest(f"{path} cannot be written: {error.strerror}", "choose another file with -o") from None
    size = path.stat().st_size
    note = _packaged_note(chosen[-1], path)
    about = {"run_ids": [run.run_id for run in chosen]} if len(chosen) > 1 else {"run_id": chosen[0].run_id}
    if as_json:
        terminal.print_json({**about, "path": str(path), "size_bytes": size, "note": note})
    else:
        terminal.print_lines(f"{path}  {format_size(size)}")
        terminal.print_pairs([("note", note)])
    return 0


def _runs_of(names: tuple[str, ...]) -> list[str | None]:
    """Return the runs that are named, those of its trials for a sweep's id, and [None] for no name; raises BadRequest."""
    if not names:
        return [None]
    from cloudtrain.history.trials import SweepHistory
    from cloudtrain.job.targets import home

    history = SweepHistory(home())
    found: list[str | None] = []
    for name in names:
        try:
            is_sweep = history.find(name).sweep_id == name
        except UnknownRun:
            is_sweep = False
        if not is_sweep:
            found.append(name)
            continue
        trials = history.trials(name)
        there = [trial.run_id for trial in trials if trial.run_id and not trial.deleted]
        if not there:
            what = (
                "the runs of its trials were deleted"
                if any(trial.deleted for trial in trials)
                else "none was submitted"
            )
            raise BadRequest(f"{name} has no trial to report: {what}", f"cloudtrain sweep show {name}")
        found += there
    return found


def _packaged_note(run: Run, path: Path) -> str:
    """Return what to do where the next submit would package the report; "" where it would not."""
    from cloudtrain.source.files import IGNORE_FILE, why

    source, written = Path(str(run.record.job.get("source") or "")), path.absolute()
    if not source.is_absolute() or source not in written.parents:
        return ""
    try:
        packaged = why(source, str(written)).inside
    except CloudtrainError:
        return ""
    name = written.relative_to(source)
    return (
        f"{name} is in the source: the next submit packages it; add a line {name} to {IGNORE_FILE}" if packaged else ""
    )
