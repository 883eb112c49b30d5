"""cloudtrain wait: wait until runs have ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.cli.view.follow import final_json, report_end, wait_quietly
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest

if TYPE_CHECKING:
    from cloudtrain.events import Status
    from cloudtrain.runs.run import Run

TIMEOUT_EXIT_CODE = 124


@options.command()
@options.argument(
    "run_ids", "[RUN]...", f"{options.RUNS} {options.NEWEST}", nargs=-1, shell_complete=options.complete_runs
)
@click.option(
    "--timeout",
    "timeout_s",
    type=options.SECONDS,
    metavar="TIME",
    help="Stop waiting after this time in all (90, in seconds, or 30m, 2h), also with several runs. The exit code is 124, and "
    "the runs continue.",
)
@click.option(
    "--foreground",
    is_flag=True,
    help="Watch the run in this process, for CI and tmux: no background watcher is needed. See above.",
)
@options.json_option_with("Print a JSON object for each run when it has ended.")
def command(run_ids: tuple[str, ...], timeout_s: float | None, foreground: bool, as_json: bool) -> int:
    """Wait until runs have ended.

    It prints nothing until then. `logs -f` prints the log, and its exit code is 0 also when the run failed. wait
    returns after all runs have ended, their further attempts too, also when one has failed. The background watcher, a
    cloudtrain process on this computer, starts those that the job's `retry` allows; `wait` starts a watcher where
    none runs. Ctrl-C ends the waiting only, with exit code 130.

    The exit code is the run's: 0, or the script's code. It is 130 when the run was cancelled, and 124 when it
    reached its time limit. It is 75 when the platform took its machine away (preempted), and 69 when its machine
    was lost. Of several runs, the first exit code that is not 0 counts, in the order of the RUN arguments. 124 is
    also the code of --timeout: standard error then says that the run is still running, and --json has `error`.

    With --foreground it does the work of the background watcher itself: it stores logs, metrics and states, and
    starts the next attempt. Use it where background processes are ended early, as on CI machines and when you log
    out. When another process already watches the run, this one waits, and takes over when the other ends.
    """
    if foreground and timeout_s is not None:
        raise click.UsageError("--timeout cannot be combined with --foreground")
    code = 0
    until = None if timeout_s is None else SYSTEM.monotonic() + timeout_s
    for run_id in run_ids or (None,):
        run = runs.find(run_id)
        if not foreground:
            run.refresh(lambda _: None)  # an outage is reported while it waits
        try:
            left_s = None if until is None else max(0.0, until - SYSTEM.monotonic())
            status = _watch(run) if foreground else wait_quietly(run, left_s)
        except TimeoutError:
            error = f"{run.run_id} is still {run.record.status.state} after {timeout_s:g} s"
            if as_json:
                terminal.print_json({**final_json(run, run.record.status), "error": error, "phase": "client"})
            terminal.note(error)
            return TIMEOUT_EXIT_CODE
        except KeyboardInterrupt:
            if foreground:
                run.refresh()  # starts a watcher in the background
            terminal.note(f"\n{run.run_id} continues; follow it again: cloudtrain wait {run.run_id}")
            return INTERRUPTED
        ended = report_end(run, status, as_json=as_json)
        code = code or ended
    return code


def _watch(run: Run) -> Status:
    """Do the work of the background watcher until a run has ended; blocking. Raises BadRequest for an attached run."""
    from cloudtrain.runs.watching.watch_all import watch_run

    if uri := run.record.attached:
        raise BadRequest(
            f"{run.run_id} was submitted from another machine, which watches it; here it is attached from {uri}",
            f"to follow it from here: cloudtrain wait {run.run_id}, or cloudtrain logs {run.run_id} -f",
        )

    def stand_by() -> None:
        terminal.note(f"{run.run_id}  another process already watches this run; waiting to take over")
        sys.stderr.flush()

    return watch_run(run.store, run.run_id, stand_by) or run.record.status
