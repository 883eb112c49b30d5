"""cloudtrain prune: delete the runs that ended long ago, or packaged sources that no run needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.rm import delete, dry_run_option, here_option, yes_option
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest
from cloudtrain.events import FINAL
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.runs.packages import Package


@options.command()
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
@dry_run_option
@here_option
@yes_option
@options.json_option
def command(older: str | None, packages: bool, dry_run: bool, here: bool, yes: bool, as_json: bool) -> int:
    """Delete old runs with their files, or packaged sources.

    With --older it does what `cloudtrain rm` does, for all runs that ended before. Stars and tags protect no run. See
    `cloudtrain rm --help` for what it keeps. With --packages it deletes the sources that were packaged on this computer
    (`bundles/` of the home). It keeps those of runs and sweeps that have not ended, and those used within the last hour.
    Runs of a deleted package cannot be resumed; rerun them with --source.

    \b
    cloudtrain prune --older 30d --dry-run
    cloudtrain prune --packages --dry-run
    """
    if older is None and not packages:
        raise click.UsageError("name what to delete: --older 30d deletes runs, --packages deletes packaged sources")
    if packages and here:
        raise click.UsageError("--here has no effect with --packages: packages are on this computer only")
    try:
        age_s = 0.0 if older is None else float(units.duration_s(older))
    except ValueError as error:
        hint = "write 30d or 12h; a month is no unit: write 30d"
        raise BadRequest(f"--older {older}: {error}", hint) from None
    if older and re.fullmatch(r"\s*\d+\s*m\s*", older, re.IGNORECASE):
        minutes = units.format_count(int(age_s) // 60, "minute")
        terminal.note(f"--older {older} is {minutes}; a month is no unit: write 30d")
    if packages:
        return _delete_packages(age_s, dry_run=dry_run, yes=yes, as_json=as_json)
    from cloudtrain.runs.run import Run

    store = runs.open_history()
    records = store.runs(limit=MOST, states=sorted(FINAL))
    ended = [(record, record.status.ended_at or record.created_at) for record in records]
    old = [Run(record.run_id, store) for record, at in ended if units.seconds_since(at) > age_s]
    if not old and not as_json:
        terminal.print_lines(f"no run ended longer than {older} ago")
    return delete(old, dry_run=dry_run, here=here, yes=yes, as_json=as_json)


def _delete_packages(older_s: float, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Print the packages that nothing needs, ask, and delete them; returns the exit code."""
    from cloudtrain.runs import packages

    store = runs.open_history()
    found = packages.find_packages(store, older_s)
    unused, kept = [one for one in found if not one.kept], [one for one in found if one.kept]
    summary = _describe(unused)
    if not as_json:
        terminal.print_pairs([(units.format_size(one.size_bytes), _describe_one(one)) for one in found])
        terminal.print_lines(summary + (f"; kept: {_describe(kept)}" if kept else ""))
    if unused and not dry_run:
        terminal.confirmer(yes=yes, as_json=as_json, verb="delete", done="deleted")(summary)
        packages.delete(store, unused)
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
