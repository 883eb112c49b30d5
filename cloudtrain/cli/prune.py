"""cloudtrain prune: delete the runs that ended long ago."""

from __future__ import annotations

import click

from cloudtrain.cli.rm import delete, dry_run_option, here_option, yes_option
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest
from cloudtrain.events import FINAL
from cloudtrain.job import units


@options.command()
@click.option(
    "--older", required=True, metavar="TIME", help="Delete the runs that ended longer ago than this: 30d, 12h."
)
@dry_run_option
@here_option
@yes_option
@options.json_option
def command(older: str, dry_run: bool, here: bool, yes: bool, as_json: bool) -> int:
    """Delete old runs, and their files on platforms and hosts.

    It does what `cloudtrain rm` does, for all runs that ended before --older. See `cloudtrain rm --help` for what it keeps.

    \b
    cloudtrain prune --older 30d --dry-run
    """
    from cloudtrain.runs.run import Run

    try:
        age_s = units.duration_s(older)
    except ValueError as error:
        raise BadRequest(f"--older {older}: {error}", "write 30d or 12h") from None
    store = runs.open_history()
    records = store.runs(limit=MOST, states=sorted(FINAL))
    ended = [(record, record.status.ended_at or record.created_at) for record in records]
    old = [Run(record.run_id, store) for record, at in ended if units.seconds_since(at) > age_s]
    if not old and not as_json:
        terminal.print_lines(f"no run ended longer than {older} ago")
    return delete(old, dry_run=dry_run, here=here, yes=yes, as_json=as_json)


MOST = 1_000_000  # runs of one history
