"""cloudtrain audit: print who submitted, cancelled and deleted runs from this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BadRequest, UnknownRun


@options.command()
@options.argument(
    "run_id",
    "[RUN]",
    "A run's id or the beginning of ids, or the address of a run's folder in its output. Default: all runs.",
    shell_complete=options.complete_runs,
)
@click.option(
    "--since",
    metavar="WHEN",
    help="Only what was done on this date or later (2026-11-01), or not longer ago than this (7d, 12h).",
)
@click.option(
    "--until", metavar="WHEN", help="Only what was done before this date (2026-12-01) or longer ago (7d, 12h)."
)
@options.json_option
def command(run_id: str | None, since: str | None, until: str | None, as_json: bool) -> int:
    """Print who submitted, cancelled or deleted runs, or used exec.

    It prints the audit log of this computer. cloudtrain never changes or removes a line, also when a run is deleted;
    whoever owns the file can. Each attempt has a line `submit` before it is sent, also those of `resume` and of
    retries. When sending failed and nothing was started, cloudtrain tries again later: each such try adds a line `try
    again`. For a run of another machine (`cloudtrain attach`), and for an address, it prints the audit log in the run's
    output instead; jobs with `audit: true` write one.

    \b
    cloudtrain audit
    cloudtrain audit --since 2026-11-01 --until 2026-12-01
    cloudtrain audit tiny-lm-261125 --json
    cloudtrain audit s3://acme-runs/nlp/tiny-lm-261125-101500-x1y2
    """
    from cloudtrain.history import audit

    start = options.parse_start(since, "--since")
    found = _read(run_id or "")
    end = options.parse_start(until, "--until") if until else "~"
    rows = [row for row in found if start <= str(row.get("at", "")) < end]
    if as_json:
        terminal.print_json(rows, indent=2)
        return 0
    if not rows:
        terminal.print_lines("the audit log has no such line")
        return 0
    names = [name for name in audit.FIELDS if any(row.get(name) not in (None, "") for row in rows)]
    texts = [tuple(str(row.get(name, "")) for name in names) for row in rows]
    terminal.print_table(names, texts, spare=[name for name in ("detail", "target") if name in names])
    return 0


def _read(run_id: str) -> Sequence[Mapping[str, object]]:
    """Return the lines of a run, of all runs, or of an address; raises BadRequest where an address has no audit log."""
    from cloudtrain.history import audit
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    uri = _output_of(run_id)
    if not uri:
        rows = list(audit.read(targets.home(), run_id))
        if not rows and run_id and (targets.home() / "history.sqlite3").exists():
            with suppress(UnknownRun):  # a short name, as `ls` prints it
                rows = list(audit.read(targets.home(), Store(targets.home()).find(run_id).run_id))
        if rows or not run_id:
            return rows
        if not Path(run_id).is_dir():
            hint = "cloudtrain audit prints all lines; for another machine's run, give the address of its folder"
            raise BadRequest(f"the audit log has no run whose id begins with {run_id}", hint)
        uri = run_id
    if not (found := audit.read_output(uri)):
        raise BadRequest(
            f"{uri} has no audit log: it is not the folder of one run in its output, or the job had no `audit: true`",
            "name the folder of one run, <output>/<run>",
        )
    return found


def _output_of(run_id: str) -> str:
    """Return where an attached run lies, or the address that was given; "" for a run of this machine."""
    if "/" in run_id:
        return run_id
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    home = targets.home()
    record = Store(home).get(run_id) if run_id and (home / "history.sqlite3").exists() else None
    return record.attached or "" if record else ""
