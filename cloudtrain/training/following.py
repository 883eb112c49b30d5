"""Follow a run until it is final, and resume it where its training says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cloudtrain.events import State, Status, without_event

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


def follow(run: Run, log: Callable[[str], None], recover: Callable[[Run, Status], bool]) -> None:
    """Log the run's lines until it is final; raises RunFailed."""
    from cloudtrain.cli.view.follow import failed_rank
    from cloudtrain.cli.view.log import LastLines
    from cloudtrain.runs.planning import advice

    last_lines, cursor = LastLines(), None
    while True:
        try:
            for line in run.logs(follow=True, after=cursor, raw=True):
                cursor = line.cursor
                last_lines.add(line)
                if line.rank >= 0 and (shown := without_event(line.text)) is not None:
                    log(f"[{line.node}:{line.rank}] {shown}")
            status = run.wait()
        except KeyboardInterrupt:
            log(f"detached: {run.run_id} continues; cloudtrain cancel {run.run_id} ends it")
            raise
        if status.state is State.SUCCEEDED:
            return
        if status.state is State.CANCELLED or not recover(run, status):
            break
        log(f"{run.run_id} ended {status.state}: resuming from its last checkpoint")
        run.resume()
    failure = advice.failure(run.run_id, status, run.verdict)
    rank_name, lines = last_lines.failure_lines(failed_rank(run))
    if lines:
        failure.add_note("\n".join([f"{rank_name}:", *lines]))
    log(str(failure))
    raise failure
