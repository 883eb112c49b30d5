"""cloudtrain cancel: end runs and stop their processes."""

from __future__ import annotations

import click

from cloudtrain.cli.view import follow, options, runs, terminal
from cloudtrain.errors import CloudtrainError


@options.command()
@click.argument("run_ids", nargs=-1, required=True, metavar="RUN...", shell_complete=options.complete_runs)
@options.json_option
def command(run_ids: tuple[str, ...], as_json: bool) -> int:
    """Cancel runs, and stop everything that they started.

    It waits up to 10 seconds for the platform to confirm. The request is stored: when the platform does not answer now, the
    background watcher cancels the run later. A run that has already ended does not change.
    """
    runs_to_cancel = [runs.find(run_id) for run_id in run_ids]  # a wrong id raises before anything is cancelled
    code = 0
    for run in runs_to_cancel:
        try:
            sentence, status = follow.cancel(run)
        except CloudtrainError as error:
            if len(runs_to_cancel) == 1:
                raise
            terminal.note(f"error: {run.run_id}: {error.message}")
            code = code or error.exit_code
            continue
        if as_json:
            terminal.print_json(
                {**runs.submitted_json(run), "state": status.state.value, "confirmed": status.state.final}
            )
        else:
            terminal.print_lines(sentence)
    return code
