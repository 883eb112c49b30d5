"""cloudtrain rm: delete runs that have ended, and what they left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest, CloudtrainError, UnknownRun, Unreachable
from cloudtrain.job.units import format_count, format_size

if TYPE_CHECKING:
    from cloudtrain.runs.remove import Remains
    from cloudtrain.runs.run import Run

dry_run_option = click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
yes_option = click.option(
    "-y",
    "--yes",
    is_flag=True,
    help="Delete without asking. Without a terminal, or with --json, nothing is deleted without -y (exit code 2).",
)
here_option = click.option(
    "--here",
    is_flag=True,
    help="Delete only what is on this computer: the run's files and its row in the history. All files elsewhere "
    "are kept: those on hosts and clusters, and the jobs in the lists of platforms.",
)


@options.command()
@options.argument("run_ids", "RUN...", options.RUNS, nargs=-1, shell_complete=options.complete_runs)
@dry_run_option
@here_option
@click.option(
    "--force",
    is_flag=True,
    help="With --here: delete a run that has not ended, too, while its platform does not answer. Its job may exist there, "
    "and nothing ends it.",
)
@yes_option
@options.json_option
def command(run_ids: tuple[str, ...], dry_run: bool, here: bool, force: bool, yes: bool, as_json: bool) -> int:
    """Delete runs here, on hosts and platforms; not files in buckets.

    It prints what it would delete, with sizes, and asks for confirmation. It refuses to delete a run that has not
    ended. Its log, metrics and row in the history are deleted too; `cloudtrain costs` and budgets still count it. It
    keeps uploaded sources and all files in buckets and in the job's `output`, because other runs may use them. Where a
    job has no `output`, it deletes the run's checkpoints and models on local, SSH and Slurm: copy them with `cloudtrain
    fetch` first. The id of an ended sweep, typed in full, deletes the sweep and the runs of its trials.

    \b
    cloudtrain rm tiny-lm-261125 --dry-run
    """
    if force and not here:
        raise click.UsageError("--force needs --here: it deletes only what is on this computer")
    selected: list[Run] = []
    sweeps: list[str] = []
    for text in run_ids:
        trials = _runs_of_sweep(text)
        if trials is not None:
            sweeps.append(text)
        selected += [runs.find(text)] if trials is None else trials
    return delete(selected, sweeps, dry_run=dry_run, here=here, force=force, yes=yes, as_json=as_json)


def _runs_of_sweep(sweep_id: str) -> list[Run] | None:
    """Return the runs of an ended sweep's trials; None where no sweep has this id. Raises BadRequest for a live one."""
    from cloudtrain.history.trials import SweepHistory

    history = SweepHistory(runs.open_history().home)
    try:
        sweep = history.find(sweep_id)
    except UnknownRun:
        return None
    if sweep.sweep_id != sweep_id:
        return None
    if sweep.live:
        hint = f"cloudtrain sweep stop {sweep_id} ends it first"
        raise BadRequest(f"{sweep_id} is still {sweep.state}: only ended sweeps can be removed", hint)
    return [runs.find(trial.run_id) for trial in history.trials(sweep_id) if trial.run_id and not trial.deleted]


def delete(
    selected: Sequence[Run],
    sweeps: Sequence[str] = (),
    *,
    dry_run: bool,
    here: bool,
    yes: bool,
    as_json: bool,
    force: bool = False,
) -> int:
    """Print what runs have left, ask, and delete it, then the sweeps; returns the exit code of the last error, else 0."""
    from cloudtrain.history.trials import SweepHistory
    from cloudtrain.runs import remove

    code, found = 0, []
    for run in selected:
        try:
            found.append((run, remove.find_remains(run, here=here, force=force)))
        except CloudtrainError as error:
            if len(selected) == 1 and not sweeps:
                if isinstance(error, Unreachable) and not here:
                    error.hint = "; or: ".join(filter(None, (error.hint, HERE)))
                raise
            code = _print_error(run, error, here=here)
    for _, remains in () if as_json else found:
        _print_remains(remains)
    total = sum(size or 0 for _, remains in found for size in remains.places.values())
    sentence = f"{format_count(len(found), 'run')}, {format_size(total)}"
    sentence += "".join(f", and the sweep {sweep_id}" for sweep_id in sweeps)
    if (found or sweeps) and dry_run and not as_json:
        terminal.print_lines(sentence)
    if (found or sweeps) and not dry_run:
        terminal.confirmer(yes=yes, as_json=as_json, verb="delete", done="deleted")(sentence)
    for run, remains in found:
        try:
            target = run.record.target or run.record.backend
            if not dry_run and (job := remove.remove(run, here=here, force=force)):
                terminal.note(MAY_EXIST.format(target=target, job=job))
        except CloudtrainError as error:
            code = _print_error(run, error, here=here)
            continue
        about = {"run_id": remains.run_id, "places": dict(remains.places), "kept": remains.kept}
        if as_json:
            terminal.print_json({**about, "deleted": not dry_run})
        elif not dry_run:
            terminal.print_lines(f"deleted {remains.run_id}")
    for sweep_id in sweeps if not dry_run and not code else ():  # while a run of it is left, it stays
        SweepHistory(runs.open_history().home).delete(sweep_id)
        if not as_json:
            terminal.print_lines(f"deleted {sweep_id}")
    return code


MAY_EXIST = "warning: a job {job} may exist on {target}, and may cost money: look for it there and stop it there"
HERE = "--here deletes only what is on this machine, and leaves the files there"


def _print_remains(remains: Remains) -> None:
    terminal.print_lines(remains.run_id)
    sizes = [(place, "" if size is None else format_size(size)) for place, size in remains.places.items()]
    terminal.print_pairs([(size or "-", place) for place, size in sizes])
    if remains.kept:
        terminal.print_pairs([("kept", remains.kept)])


def _print_error(run: Run, error: CloudtrainError, *, here: bool) -> int:
    terminal.note(f"error: {run.run_id}: {error}")
    if isinstance(error, Unreachable) and not here:
        terminal.note(f"  hint: {HERE}")
    return error.exit_code
