"""cloudtrain watch: the watcher in the foreground."""

from __future__ import annotations

import sys
import time

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.cli.view.follow import tell_end
from cloudtrain.errors import BadRequest

STAND_BY_S = 0.25


@options.command()
@options.run_or_newest
@options.json_option
def command(run: str | None, as_json: bool) -> int:
    """Watch a run in the foreground, for CI and tmux.

    The loop that `submit` starts in the background: it brings log events, metrics and states into the history and
    starts the next attempt when one is due. While another process watches it stands by, and takes over when that one
    ends. Exits with the run's own code; the run goes on when this command is interrupted.
    """
    from cloudtrain.runs.watch import Watcher

    found = runs.find(run)
    if uri := found.record.attached:
        raise BadRequest(
            f"{found.run_id} is watched where it was submitted (attached from {uri})",
            f"cloudtrain wait {found.run_id}, or logs -f",
        )
    watcher = Watcher(found.store, found.run_id)
    told = False
    try:
        while not (status := found.record.status).state.final:
            if watcher.run() is None:
                if not told:
                    terminal.note(f"{found.run_id}  another process watches it; standing by")
                    sys.stderr.flush()
                    told = True
                time.sleep(STAND_BY_S)
    except KeyboardInterrupt:
        found.store.release(found.run_id, watcher.me)
        found.refresh()  # somebody should watch: this starts one in the background
        terminal.note(f"\n{found.run_id} goes on; return with  cloudtrain watch {found.run_id}")
        return INTERRUPTED
    return tell_end(found, status, as_json=as_json)
