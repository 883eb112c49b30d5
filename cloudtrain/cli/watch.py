"""cloudtrain watch: run the watcher in the foreground."""

from __future__ import annotations

import sys

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.cli.view.follow import report_end
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest

STANDBY_POLL_S = 0.25


@options.command()
@options.run_or_newest
@options.json_option
def command(run_id: str | None, as_json: bool) -> int:
    """Watch a run in the foreground, for CI and tmux.

    It does the work of the background watcher, which `submit` starts: it stores logs, metrics and states, and
    starts the next attempt when the job's `retry` allows one. Use it where processes in the background are ended
    early, as on CI machines and when you log out. When another process already watches the run, this one waits, and
    takes over when the other ends. It prints how the run ends, and the exit code is the run's.

    `wait` and `logs -f` do not watch: they start a background watcher where none runs, and read what it stores.
    Ctrl-C ends the watching only, with exit code 130. The run continues, and a background watcher takes over,
    unless this machine ends it when you log out.
    """
    from cloudtrain.runs.watching.watch import Watcher

    run = runs.find(run_id)
    if uri := run.record.attached:
        raise BadRequest(
            f"{run.run_id} was submitted from another machine, which watches it; here it is attached from {uri}",
            f"to follow it from here: cloudtrain wait {run.run_id}, or cloudtrain logs {run.run_id} -f",
        )
    watcher = Watcher(run.store, run.run_id)
    standby_printed = False
    try:
        while not (status := run.record.status).state.final:
            if watcher.run() is None:
                if not standby_printed:
                    terminal.note(f"{run.run_id}  another process already watches this run; waiting to take over")
                    sys.stderr.flush()
                    standby_printed = True
                SYSTEM.sleep(STANDBY_POLL_S)
    except KeyboardInterrupt:
        run.store.release(run.run_id, watcher.me)
        run.refresh()  # starts a watcher in the background
        terminal.note(f"\n{run.run_id} continues; follow it again: cloudtrain watch {run.run_id}")
        return INTERRUPTED
    return report_end(run, status, as_json=as_json)
