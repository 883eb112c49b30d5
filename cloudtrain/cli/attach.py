"""cloudtrain attach: add a run that was submitted elsewhere to the history."""

from __future__ import annotations

import click

from cloudtrain.cli.view import options, runs, summary, terminal


@options.command()
@click.argument("uri", metavar="URI")
@options.json_option
def command(uri: str, as_json: bool) -> int:
    """Add a run that was submitted elsewhere to the history here.

    URI is the run's folder in its job's output: a path, s3:// or gs://. `show`, `logs` and `metrics` then work on it as on
    a run of your own. `cloudtrain attach URI` a second time reads what is new since then. The run cannot be cancelled or
    rerun from here. `cloudtrain resume` starts its next attempt here, with the job and the source in its output.

    \b
    cloudtrain attach s3://bucket/runs/tiny-lm-261120-101500-ab3d
    cloudtrain attach /shared/runs/tiny-lm-261120-101500-ab3d --json
    """
    from cloudtrain.runs.attach import attach

    run = attach(uri, runs.open_history().home)
    if as_json:
        terminal.print_json(runs.shown_json(run), indent=2)
        return 0
    record, attempts = run.record, run.attempts
    origin = f"attached from {record.attached}" if record.attached else "was submitted from here: nothing to attach"
    status = runs.describe_end(record.status) if record.status.state.final else str(record.status.state)
    terminal.print_lines(f"{run.run_id}  {origin}", style="bold")
    terminal.print_pairs(
        [
            ("state", status),
            ("reason", record.status.reason),
            ("attempts", str(len(attempts))),
            ("backend", summary.describe_target(attempts[-1].plan)),
        ]
    )
    summary.print_next_commands(
        run.run_id, "show", "logs", "metrics", "fetch", *(["resume"] if record.status.failed else [])
    )
    return 0
