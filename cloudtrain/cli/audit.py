"""cloudtrain audit: print who submitted, cancelled and deleted runs from this machine."""

from __future__ import annotations

import click

from cloudtrain.cli.view import options, terminal


@options.command()
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=options.complete_runs)
@options.json_option
def command(run_id: str | None, as_json: bool) -> int:
    """Print who submitted, entered, cancelled and deleted runs.

    The log is append-only, and its lines stay when a run is deleted. RUN is a run's id or the beginning of one. Each attempt
    that was sent has a line, those of `resume` and of retries too.

    \b
    cloudtrain audit
    cloudtrain audit tiny-lm-26 --json
    """
    from cloudtrain.history import audit
    from cloudtrain.job import targets

    rows = list(audit.read(targets.home(), run_id or ""))
    if as_json:
        terminal.print_json(rows, indent=2)
        return 0
    texts = [tuple(str(row.get(name, "")) for name in audit.FIELDS) for row in rows]
    terminal.print_table(audit.FIELDS, texts, spare=("detail", "target"))
    return 0
