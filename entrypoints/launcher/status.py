"""Read and write status.json, the state of a node's supervisor; replaced atomically."""

from __future__ import annotations

import json
import os
import time

from . import processes
from .clock import SYSTEM, Clock

VERSION = 1
# Seconds that this host's clock is behind that of the client who started it; "" below what a message may take.
CLOCK_OFFSET_S = float(os.environ.get("CLOUDTRAIN_CLOCK_OFFSET_S") or 0.0)
FINAL = frozenset({"SUCCEEDED", "FAILED", "PREEMPTED", "TIMED_OUT", "CANCELLED", "LOST"})


def now(clock: Clock = SYSTEM) -> str:
    """Return the time in UTC, ISO 8601 with microseconds."""
    return stamp(clock.now())


def stamp(seconds: float) -> str:
    """Return a time of this host, in seconds since 1970, as the client's clock has it: UTC, ISO 8601 with microseconds."""
    seconds += CLOCK_OFFSET_S
    whole = int(seconds)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((seconds - whole) * 1e6):06d}Z"


class Status:
    """The fields of status.json; `set` writes them. Without a folder (clouds) nothing is written."""

    def __init__(self, folder: str | None, guard: int, clock: Clock = SYSTEM) -> None:
        self._folder = folder
        self.fields: dict[str, object] = {
            "version": VERSION,
            "pid": guard,
            "start_ticks": processes.start_ticks(guard),
            "boot_id": processes.boot_id(),
            "state": "STARTING",
            "exit_code": None,
            "reason": "",
            "by": None,
            "failed_rank": None,
            "failed_at": None,
            "world_size": None,
            "started_at": now(clock),
            "ended_at": None,
        }

    def set(self, **fields: object) -> None:
        """Change fields and write the file; a disk that is full keeps the former one."""
        self.fields.update(fields)
        if self._folder is not None:
            try:
                write(self._folder, self.fields)
            except OSError:
                pass  # the supervisor must outlive a full disk; the next change tries again

    @property
    def cancelled(self) -> bool:
        """Whether a person asked to cancel: the folder or file `cancel` exists beside the status."""
        return self._folder is not None and os.path.exists(os.path.join(self._folder, "cancel"))


def read(folder: str) -> dict[str, object] | None:
    """Return what status.json of a folder says, or None where there is none."""
    try:
        with open(os.path.join(folder, "status.json"), encoding="utf-8") as file:
            fields = json.load(file)
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


def write(folder: str, fields: dict[str, object]) -> None:
    """Replace status.json atomically; on a full disk write over it instead. Raises OSError."""
    path = os.path.join(folder, "status.json")
    half = f"{path}.{os.getpid()}"
    text = json.dumps(fields)
    try:
        with open(half, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(half, path)
    except OSError:
        try:
            os.unlink(half)
        except OSError:
            pass
        with open(path, "r+", encoding="utf-8") as file:  # its block already exists
            file.write(text.ljust(os.path.getsize(path)))
            file.truncate()
