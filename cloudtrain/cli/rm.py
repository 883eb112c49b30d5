"""cloudtrain rm: delete runs that have ended, and what they left, or packaged sources that no run needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click
from click.shell_completion import CompletionItem

from cloudtrain.cli.ls import complete_filter
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest, CloudtrainError, UnknownRun, Unreachable
from cloudtrain.events import FINAL
from cloudtrain.job import units
from cloudtrain.job.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from cloudtrain.runs.remove import Package, Remains
    from cloudtrain.runs.run import Run

MOST = 1_000_000  # runs of one history
MAY_EXIST = "warning: a job {job} may exist on {target}, and may cost money: look for it there and stop it there"
HERE = "--here deletes only what is on this machine, and leaves the files there"


class _How(NamedTuple):
    """The options that say how something is deleted."""

    dry_run: bool
    here: bool
    force: bool
    take_over: bool
    yes: bool
    as_json: bool

    def confirm(self, sentence: str) -> None:
        """Ask whether what the sentence counts is to be deleted; raises BadRequest where it is not."""
        if not self.dry_run:
            terminal.confirmer(yes=self.yes, as_json=self.as_json, verb="delete", done="deleted")(sentence)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    complete = complete_filter if ctx.params.get("ended") else options.complete_runs
    return complete(ctx, param, incomplete)


@options.command()
@options.argument(
    "words",
    "[RUN|FILTER...]",
    "Ids of runs, or of ended sweeps in full. With --ended or --older: terms as in `cloudtrain ls`, such as state:failed.",
    nargs=-1,
    shell_complete=_complete,
)
@click.option("--ended", is_flag=True, help="Delete all ended runs for which the terms of FILTER hold.")
@click.option(
    "--older",
    metavar="TIME",
    help="Delete the runs that ended longer ago than this, of those that FILTER names: 30d, 12h. Units: d, h, m "
    "(minutes), s; a month is 30d.",
)
@click.option(
    "--except", "excepted", metavar="RUN", multiple=True, shell_complete=options.complete_runs,
    help="With --ended or --older: keep this run; may be repeated.",
)  # fmt: skip
@click.option("--include-starred", is_flag=True, help="With --ended or --older: delete runs with a star too.")
@click.option(
    "--packages",
    is_flag=True,
    help="Delete packaged sources on this computer instead of runs. With --older only those that were not used for this time.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@click.option(
    "--here",
    is_flag=True,
    help="Delete only what is on this computer: the run's files and its row in the history. All files elsewhere "
    "are kept: those on hosts and clusters, and the jobs in the lists of platforms.",
)
@click.option(
    "--force",
    is_flag=True,
    help="With --here: delete a run that has not ended, too, while its platform does not answer. Its job may exist there, "
    "and nothing ends it. With --packages: delete those used within the last hour too.",
)
@options.take_over_option
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    help="Delete without asking. Without a terminal, or with --json, nothing is deleted without -y (exit code 2).",
)
@options.json_option
def command(
    words: tuple[str, ...],
    ended: bool,
    older: str | None,
    excepted: tuple[str, ...],
    include_starred: bool,
    packages: bool,
    dry_run: bool,
    here: bool,
    force: bool,
    take_over: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete runs here, on hosts and platforms; not files in buckets.

    It prints what it would delete, with sizes, and asks for confirmation. It refuses to delete a run that has not
    ended. Its log, metrics and row in the history are deleted too; `cloudtrain costs` and budgets still count it. It
    keeps uploaded sources and all files in buckets and in the job's `output`, because other runs may use them. Where a
    job has no `output`, it deletes the run's checkpoints and models on local, SSH and Slurm: copy them with `cloudtrain
    fetch` first. The id of an ended sweep, typed in full, deletes the sweep and the runs of its trials.

    --ended and --older keep runs with a star, unless --include-starred is given. --older alone deletes archived runs
    too; with FILTER they are kept, unless FILTER has is:archived. --packages deletes the sources that were packaged on
    this computer (`bundles/` of the home). It keeps those of runs and sweeps that have not ended and, without --force,
    those used within the last hour. Runs of a deleted package cannot be resumed; rerun them with --source.

    \b
    cloudtrain rm tiny-lm-261125 --dry-run
    cloudtrain rm --older 30d --dry-run
    cloudtrain rm --ended state:failed tag:test --except tiny-lm-261125
    cloudtrain rm --packages --dry-run
    """
    filtered, wanted = ended or older is not None, " ".join(words).strip()
    if words and not wanted:
        raise click.UsageError("an empty filter would select every run: name runs or a filter, or give --older alone")
    if not (words or packages or older is not None):
        hint = "--older 30d deletes old runs, --packages packaged sources"
        raise click.UsageError(f"say what to delete: ids of runs, or --ended and a filter such as state:failed; {hint}")
    if packages and (words or excepted or include_starred or here):
        raise click.UsageError(
            "FILTER, --except, --include-starred and --here are about runs: they have no effect with --packages"
        )
    if (excepted or include_starred) and not filtered:
        raise click.UsageError("--except and --include-starred need --ended or --older")
    if force and not (here or packages):
        raise click.UsageError("--force needs --here or --packages: it deletes only what is on this computer")
    how = _How(dry_run, here, force, take_over, yes, as_json)
    age_s = 0.0 if older is None else _parse_age(older)
    if packages:
        return _delete_packages(age_s, how)
    if filtered:
        selected = _ended_runs(wanted, age_s, {runs.find(text).run_id for text in excepted}, include_starred)
        if not selected and not as_json:
            terminal.print_lines("no ended run matches" if wanted else f"no run ended longer than {older} ago")
        return _delete(selected, (), how)
    selected, sweeps = [], []
    for text in words:
        trials = _runs_of_sweep(text)
        if trials is not None:
            sweeps.append(text)
        selected += [runs.find(text)] if trials is None else trials
    return _delete(selected, sweeps, how)


# -- runs -------------------------------------------------------------------------------------------------------------


def _parse_age(older: str) -> float:
    """Return the seconds of --older; raises BadRequest. Says what `m` means."""
    try:
        age_s = float(units.duration_s(older))
    except ValueError as error:
        raise BadRequest(f"--older {older}: {error}", "write 30d or 12h; a month is no unit: write 30d") from None
    if re.fullmatch(r"\s*\d+\s*m\s*", older, re.IGNORECASE):
        minutes = format_count(int(age_s) // 60, "minute")
        terminal.note(f"--older {older} is {minutes}; a month is no unit: write 30d")
    return age_s


def _ended_runs(text: str, age_s: float, kept: set[str], include_starred: bool) -> list[Run]:
    """Return the runs of a filter ("" for all) that ended longer ago than `age_s`, and name those kept for their star."""
    from cloudtrain.history import marks, table
    from cloudtrain.runs.run import Run

    store = runs.open_history()
    if text:
        records = [row.record for row in table.first_rows(store, table.Query(f"{text} state:ended"), limit=MOST)]
    else:
        records = store.runs(limit=MOST, states=sorted(FINAL))
    ended = [(record.run_id, record.status.ended_at or record.created_at) for record in records]
    chosen = [run_id for run_id, at in ended if _age_s(at) > age_s and run_id not in kept]
    starred = [] if include_starred else [run_id for run_id in chosen if marks.read(store, run_id).starred]
    if starred:
        these = ", ".join(starred[:3]) + (", ..." if len(starred) > 3 else "")
        terminal.note(
            f"kept: {format_count(len(starred), 'run')} with a star ({these}); --include-starred deletes them"
        )
    return [Run(run_id, store) for run_id in chosen if run_id not in starred]


def _age_s(moment: str) -> float:
    """Return the seconds since a stored time; 0 where it is damaged: that run is kept."""
    parsed = runs.parse_time(moment)
    return (SYSTEM.utc() - parsed).total_seconds() if parsed else 0


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


def _delete(selected: Sequence[Run], sweeps: Sequence[str], how: _How) -> int:
    """Print what runs have left, ask, and delete it, then the sweeps; returns the exit code of the last error, else 0."""
    from cloudtrain.history.trials import SweepHistory
    from cloudtrain.runs import remove

    code, left = 0, []
    for run in selected:
        try:
            left.append((run, remove.find_remains(run, here=how.here, force=how.force, take_over=how.take_over)))
        except CloudtrainError as error:
            if len(selected) == 1 and not sweeps:
                if isinstance(error, Unreachable) and not how.here:
                    error.hint = "; or: ".join(filter(None, (error.hint, HERE)))
                raise
            code = _print_error(run, error, here=how.here)
    if left or sweeps:
        total = sum(size or 0 for _, remains in left for size in remains.places.values())
        sentence = f"{format_count(len(left), 'run')}, {format_size(total)}"
        sentence += "".join(f", and the sweep {sweep_id}" for sweep_id in sweeps)
        if not how.as_json:
            for run, remains in left:
                _print_remains(run, remains)
            terminal.print_lines(*[sentence] * how.dry_run)
        how.confirm(sentence)
    for run, remains in left:
        code = _remove(run, remains, how) or code
    for sweep_id in sweeps if not how.dry_run and not code else ():  # while a run of it is left, it stays
        SweepHistory(runs.open_history().home).delete(sweep_id)
        if not how.as_json:
            terminal.print_lines(f"deleted {sweep_id}")
    return code


def _remove(run: Run, remains: Remains, how: _How) -> int:
    """Delete one run, unless it is a dry run, and print it; returns the exit code."""
    from cloudtrain.runs import remove

    if not how.dry_run:
        target = run.record.target or run.record.backend
        try:
            if job := remove.remove(run, here=how.here, force=how.force):
                terminal.note(MAY_EXIST.format(target=target, job=job))
        except CloudtrainError as error:
            return _print_error(run, error, here=how.here)
    if how.as_json:
        row = {"run_id": remains.run_id, "places": dict(remains.places), "kept": remains.kept}
        terminal.print_json({**row, "deleted": not how.dry_run})
    elif not how.dry_run:
        terminal.print_lines(f"deleted {remains.run_id}")
    return 0


def _print_remains(run: Run, remains: Remains) -> None:
    status, size = run.record.status, sum(each or 0 for each in remains.places.values())
    ended = f"ended {runs.elapsed(status.ended_at)} ago" if status.ended_at else "has not ended"
    terminal.print_lines(f"{remains.run_id}  {status.state}, {ended}, {format_size(size)}")
    sizes = [(place, "" if size is None else format_size(size)) for place, size in remains.places.items()]
    terminal.print_pairs([(size or "-", place) for place, size in sizes])
    if remains.kept:
        terminal.print_pairs([("kept", remains.kept)])


def _print_error(run: Run, error: CloudtrainError, *, here: bool) -> int:
    terminal.note(f"error: {run.run_id}: {error}")
    if isinstance(error, Unreachable) and not here:
        terminal.note(f"  hint: {HERE}")
    return error.exit_code


# -- packages ---------------------------------------------------------------------------------------------------------


def _delete_packages(older_s: float, how: _How) -> int:
    """Print the packages that nothing needs, ask, and delete them; returns the exit code."""
    from cloudtrain.runs.remove import delete_packages, find_packages, measure_cache

    store = runs.open_history()
    packages = find_packages(store, older_s, force=how.force)
    unused, kept = [one for one in packages if not one.kept], [one for one in packages if one.kept]
    summary = _describe(unused)
    if not how.as_json:
        terminal.print_pairs([(format_size(one.size_bytes), _describe_one(one)) for one in packages])
        cache = measure_cache(store)
        also = f"; {format_size(cache)} of digests that make the next package faster" if cache else ""
        terminal.print_lines(summary + (f"; kept: {_describe(kept)}" if kept else "") + also)
    if unused and not how.dry_run:
        how.confirm(summary)
        delete_packages(store, unused)
        if not how.as_json:
            terminal.print_lines(f"deleted {summary}")
    for package in unused if how.as_json else ():
        row = {"sha256": package.sha256, "size_bytes": package.size_bytes, "source": package.source}
        terminal.print_json({**row, "deleted": not how.dry_run})
    return 0


def _describe_one(package: Package) -> str:
    why = f"(kept: {package.kept})" if package.kept else ""
    used = f"used {format_duration(package.idle_s)} ago"
    return "  ".join(text for text in (package.sha256[:12], package.source, used, why) if text)


def _describe(packages: Sequence[Package]) -> str:
    """Return how many packages there are, and their bytes together."""
    size = format_size(sum(package.size_bytes for package in packages))
    return f"{format_count(len(packages), 'package')}, {size}"
