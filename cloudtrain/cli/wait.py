"""cloudtrain wait: wait until runs have ended."""

from __future__ import annotations

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.cli.view.follow import final_json, report_end, wait_quietly

TIMEOUT_EXIT_CODE = 124


@options.command()
@click.argument("run_ids", nargs=-1, metavar="[RUN]...", shell_complete=options.complete_runs)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Stop waiting for a run after so many seconds, with exit code 124. The run continues.",
)
@options.json_option
def command(run_ids: tuple[str, ...], timeout_s: float | None, as_json: bool) -> int:
    """Wait until runs have ended.

    It prints nothing until then; `logs -f` prints the log and exits with 0. Ctrl-C ends the waiting only, with exit code 130.
    The default RUN is the newest. It waits for all runs, also when one has failed, and for further attempts that the watcher
    starts.

    The exit code is the run's: 0, or the script's code. It is 130 when the run was cancelled, and 124 when it reached its
    time limit. It is 75 when the platform took its machine away (preempted), and 69 when its machine was lost. Of several
    runs, the first exit code that is not 0 counts, in the order of the RUN arguments. 124 is also the code of --timeout:
    standard error then says that the run is still running, and --json has `error`.
    """
    code = 0
    for run_id in run_ids or (None,):
        run = runs.find(run_id)
        run.refresh(lambda _: None)  # an outage is reported while it waits
        try:
            status = wait_quietly(run, timeout_s)
        except TimeoutError as error:
            if as_json:
                terminal.print_json({**final_json(run, run.record.status), "error": str(error), "phase": "client"})
            terminal.note(str(error))
            return TIMEOUT_EXIT_CODE
        except KeyboardInterrupt:
            terminal.note(f"\n{run.run_id} continues; follow it again: cloudtrain wait {run.run_id}")
            return INTERRUPTED
        ended = report_end(run, status, as_json=as_json)
        code = code or ended
    return code
