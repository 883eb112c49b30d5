"""cloudtrain audit: print who submitted, cancelled and deleted runs from this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from cloudtrain.cli.view import options, terminal


@options.command()
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=options.complete_runs)
@options.json_option
def command(run_id: str | None, as_json: bool) -> int:
    """Print who submitted, entered, cancelled and deleted runs.

    The log is append-only, and its lines stay when a run is deleted. RUN is a run's id or the beginning of one. Each attempt
    that was sent has a line, those of `resume` and of retries too. Of an attached run, and of the address of a run,
    <output>/<run>, the lines in its output are printed: jobs with `audit: true` write them.

    \b
    cloudtrain audit
    cloudtrain audit tiny-lm-26 --json
    cloudtrain audit s3://acme-runs/nlp/tiny-lm-261125-101500-x1y2
    """
    from cloudtrain.history import audit
    from cloudtrain.job import targets

    rows: Sequence[Mapping[str, object]]
    if uri := _output_of(run_id or ""):
        from cloudtrain.runs import output_audit

        rows = output_audit.read(uri)
    else:
        rows = list(audit.read(targets.home(), run_id or ""))
    if as_json:
        terminal.print_json(rows, indent=2)
        return 0
    texts = [tuple(str(row.get(name, "")) for name in audit.FIELDS) for row in rows]
    terminal.print_table(audit.FIELDS, texts, spare=("detail", "target"))
    return 0


def _output_of(run_id: str) -> str:
    """Return where an attached run lies, or the address that was given; "" for a run of this machine."""
    if "/" in run_id:
        return run_id
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    home = targets.home()
    record = Store(home).get(run_id) if run_id and (home / "history.sqlite3").exists() else None
    return record.attached or "" if record else ""
