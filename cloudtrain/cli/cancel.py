"""cloudtrain cancel: end runs and everything that they started."""

from __future__ import annotations

import click

from cloudtrain.cli.view import follow, options, runs, terminal
from cloudtrain.errors import CloudtrainError


@options.command()
@click.argument("run", nargs=-1, required=True, metavar="RUN...", shell_complete=options.complete_runs)
@options.json_option
def command(run: tuple[str, ...], as_json: bool) -> int:
    """End runs and everything that they started.

    The wish is stored before it is acted on. Waits up to 10 seconds for the platform's word, and says so when it has
    not come yet: the run ends nevertheless. A run that has ended already is left as it is.
    """
    found = [runs.find(name) for name in run]  # all ids are right, or nothing is cancelled
    code = 0
    for each in found:
        try:
            sentence, status = follow.cancel(each)
        except CloudtrainError as error:
            if len(found) == 1:
                raise
            terminal.note(f"error: {each.run_id}: {error.message}")
            code = code or error.exit_code
            continue
        if as_json:
            terminal.print_json(
                {**runs.submitted_json(each), "state": status.state.value, "confirmed": status.state.final}
            )
        else:
            terminal.say(sentence)
    return code
