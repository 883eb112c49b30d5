"""What the guard says when the supervisor cannot any more."""

from __future__ import annotations

from . import status
from .log import Log
from .world.outcome import EXIT_LOST


def record_loss(folder: str | None, guard: int, number: int) -> int:
    """Write that the supervisor was killed by a signal, unless it had said its last word; return the exit code."""
    reason = f"the supervisor was killed by signal {number}"
    if folder is None:
        Log(1).event("alarm", reason=reason)
        return EXIT_LOST
    known = status.read(folder) or status.Status(folder, guard).fields
    if known["state"] in status.FINAL:
        code = known["exit_code"]
        return code if isinstance(code, int) else EXIT_LOST
    known.update(state="LOST", reason=reason, by="launcher", exit_code=None, ended_at=status.now())
    try:
        log = Log.in_folder(folder)
        log.say(reason)
        log.event("result", code=EXIT_LOST, state="LOST", by="launcher", failed_rank=None, reason=reason)
        log.event("state", state="LOST")
    except OSError:
        pass  # a full disk: the status matters more
    try:
        status.write(folder, known)
    except OSError:
        pass
    return EXIT_LOST
