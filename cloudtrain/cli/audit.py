"""cloudtrain audit: print who submitted, cancelled and deleted runs from this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloudtrain.cli.view import options, terminal


@options.command()
@options.argument(
    "run_id",
    "[RUN]",
    "A run's id or the beginning of ids, or the address of a run's folder in its output. Default: all runs.",
    shell_complete=options.complete_runs,
)
@options.json_option
def command(run_id: str | None, as_json: bool) -> int:
    """Print who submitted, cancelled or deleted runs, or used exec.

    It prints the audit log of this computer. Its lines are never changed or removed, also when a run is deleted. Each attempt
    that was sent has a line, those of `resume` and of retries too. For an attached run, and for an address, it prints the
    audit log in the run's output instead; jobs with `audit: true` write one.

    \b
    cloudtrain audit
    cloudtrain audit tiny-lm-261125 --json
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
