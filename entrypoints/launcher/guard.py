"""The guard's last step: write the final status and log lines of a supervisor that was killed."""

from __future__ import annotations

from . import status
from .log import Log
from .world.outcome import EXIT_LOST


def record_loss(folder: str | None, guard: int, number: int) -> int:
    """Write that the supervisor was killed by a signal, unless its status was final already; return the exit code."""
    reason = f"the supervisor was killed by signal {number}"
    if folder is None:
        Log(1).event("alarm", reason=reason)
        return EXIT_LOST
    fields = status.read(folder) or status.Status(folder, guard).fields
    if fields["state"] in status.FINAL:
        code = fields["exit_code"]
        return code if isinstance(code, int) else EXIT_LOST
    fields.update(state="LOST", reason=reason, by="launcher", exit_code=None, ended_at=status.now())
    try:
        log = Log.in_folder(folder)
        log.say(reason)
        log.event("result", code=EXIT_LOST, state="LOST", by="launcher", failed_rank=None, reason=reason)
        log.event("state", state="LOST")
        log.close()
    except OSError:
        pass  # a full disk: the status matters more
    try:
        status.write(folder, fields)
    except OSError:
        pass
    return EXIT_LOST
