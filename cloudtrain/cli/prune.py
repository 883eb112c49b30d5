"""cloudtrain prune: delete the runs that ended long ago, or packaged sources that no run needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.ls import complete_filter
from cloudtrain.cli.rm import delete, dry_run_option, here_option, yes_option
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest
from cloudtrain.events import FINAL
from cloudtrain.history import marks
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.runs.remove import Package


@options.command()
@options.argument(
    "words",
    "[FILTER...]",
    "Delete the ended runs for which all these terms hold, as in `cloudtrain ls`: state:failed, tag:old.",
    nargs=-1,
    shell_complete=complete_filter,
)
@click.option(
    "--older",
    metavar="TIME",
    help="Delete the runs that ended longer ago than this: 30d, 12h. Units: d, h, m (minutes), s; a month is 30d.",
)
@click.option(
    "--packages",
    is_flag=True,
    help="Delete packaged sources on this computer instead of runs. With --older only those that were not used for this time.",
)
@click.option(
    "--except", "excepted", metavar="RUN", multiple=True, shell_complete=options.complete_runs,
    help="Keep this run; may be repeated.",
)  # fmt: skip
@click.option("--include-starred", is_flag=True, help="Delete runs with a star too.")
@click.option("--force", is_flag=True, help="With --packages: delete those used within the last hour too.")
@dry_run_option
@here_option
@yes_option
@options.json_option
def command(
    words: tuple[str, ...],
    older: str | None,
    packages: bool,
    excepted: tuple[str, ...],
    include_starred: bool,
    force: bool,
    dry_run: bool,
    here: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete old runs with their files, or packaged sources.

    It does what `cloudtrain rm` does, for all ended runs that match FILTER and --older, where both are given. See
    `cloudtrain rm --help` for what it keeps. Runs with a star are kept, unless --include-starred is given. --older
    alone deletes archived runs too; with FILTER they are kept, unless FILTER has is:archived. With --packages it
    deletes the sources that were packaged on this computer (`bundles/` of the home). It keeps those of runs and sweeps
    that have not ended and, without --force, those used within the last hour. Runs of a deleted package cannot be
    resumed; rerun them with --source.

    \b
    cloudtrain prune --older 30d --dry-run
    cloudtrain prune state:failed tag:test --except tiny-lm-261125
    cloudtrain prune --packages --dry-run
    """
    if older is None and not packages and not words:
        what = "--older 30d or a filter such as state:failed deletes runs, --packages deletes packaged sources"
        raise click.UsageError(f"say what to delete: {what}")
    if packages and here:
        raise click.UsageError("--here has no effect with --packages: packages are on this computer only")
    if packages and (words or excepted or include_starred):
        raise click.UsageError(
            "FILTER, --except and --include-starred choose runs: they have no effect with --packages"
        )
    if force and not packages:
        raise click.UsageError("--force is about packages: give it with --packages")
    try:
        age_s = 0.0 if older is None else float(units.duration_s(older))
    except ValueError as error:
        hint = "write 30d or 12h; a month is no unit: write 30d"
        raise BadRequest(f"--older {older}: {error}", hint) from None
    if older and re.fullmatch(r"\s*\d+\s*m\s*", older, re.IGNORECASE):
        minutes = units.format_count(int(age_s) // 60, "minute")
        terminal.note(f"--older {older} is {minutes}; a month is no unit: write 30d")
    if packages:
        return _delete_packages(age_s, force=force, dry_run=dry_run, yes=yes, as_json=as_json)
    from cloudtrain.history import table
    from cloudtrain.runs.run import Run

    store = runs.open_history()
    if words:
        query = table.Query(" ".join((*words, "state:ended")))
        records = [row.record for row in table.first_rows(store, query, limit=MOST)]
    else:
        records = store.runs(limit=MOST, states=sorted(FINAL))
    ended = [(record, record.status.ended_at or record.created_at) for record in records]
    kept = {runs.find(text).run_id for text in excepted}
    chosen = [record.run_id for record, at in ended if _age_s(at) > age_s and record.run_id not in kept]
    starred = [] if include_starred else [run_id for run_id in chosen if marks.read(store, run_id).starred]
    if starred:
        these = ", ".join(starred[:3]) + (", ..." if len(starred) > 3 else "")
        terminal.note(
            f"kept: {units.format_count(len(starred), 'run')} with a star ({these}); --include-starred deletes them"
        )
    found = [Run(run_id, store) for run_id in chosen if run_id not in starred]
    if not chosen and not as_json:
        terminal.print_lines("no ended run matches" if words else f"no run ended longer than {older} ago")
    return delete(found, dry_run=dry_run, here=here, yes=yes, as_json=as_json)


def _delete_packages(older_s: float, *, force: bool, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Print the packages that nothing needs, ask, and delete them; returns the exit code."""
    from cloudtrain.runs.remove import delete_packages, find_packages, measure_cache

    store = runs.open_history()
    found = find_packages(store, older_s, force=force)
    unused, kept = [one for one in found if not one.kept], [one for one in found if one.kept]
    summary = _describe(unused)
    if not as_json:
        terminal.print_pairs([(units.format_size(one.size_bytes), _describe_one(one)) for one in found])
        cache = measure_cache(store)
        also = f"; {units.format_size(cache)} of digests that make the next package faster" if cache else ""
        terminal.print_lines(summary + (f"; kept: {_describe(kept)}" if kept else "") + also)
    if unused and not dry_run:
        terminal.confirmer(yes=yes, as_json=as_json, verb="delete", done="deleted")(summary)
        delete_packages(store, unused)
        if not as_json:
            terminal.print_lines(f"deleted {summary}")
    for package in unused if as_json else ():
        row = {"sha256": package.sha256, "size_bytes": package.size_bytes, "source": package.source}
        terminal.print_json({**row, "deleted": not dry_run})
    return 0


def _describe_one(package: Package) -> str:
    why = f"(kept: {package.kept})" if package.kept else ""
    return "  ".join(text for text in (package.sha256[:12], package.source, why) if text)


def _describe(found: Sequence[Package]) -> str:
    """Return how many packages there are, and their bytes together."""
    size = units.format_size(sum(package.size_bytes for package in found))
    return f"{units.format_count(len(found), 'package')}, {size}"


MOST = 1_000_000  # runs of one history


def _age_s(moment: str) -> float:
    """Return the seconds since a stored time; 0 where it is damaged: that run is kept."""
    parsed = runs.parse_time(moment)
    return (SYSTEM.utc() - parsed).total_seconds() if parsed else 0
