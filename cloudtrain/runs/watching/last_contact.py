"""When the platform of a run was last asked, and whether it answered: what one process was told serves all readers.

`runs/<run>/asked` has the time as its modification time, and the error where there was no answer.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.history.records import AttemptRecord
from cloudtrain.job.units import format_time, unix_time

FRESH_S = 5.0  # nobody asks again within this time
OLD_FRESH_S = 30.0  # the same for a run that is older than OLD_S
OLD_S = 600.0


@dataclass(frozen=True)
class Asked:
    """The last question for a run's status: when, and the error where there was no answer."""

    at: float  # seconds since 1970
    shared: bool = False  # the platform should be asked rarely
    error: str = ""
    since: str = ""  # of the first question without an answer, UTC
    unreachable: bool = False
    clock: Clock = SYSTEM

    @property
    def age_s(self) -> float:
        return max(0.0, self.clock.now() - self.at)

    def is_fresh(self, attempt: AttemptRecord) -> bool:
        """Return whether a reader takes the stored answer instead of asking for the run's newest attempt again."""
        began = unix_time(attempt.created_at)
        return (
            self.shared
            and began < self.at
            and abs(self.clock.now() - self.at) < fresh_s(attempt.created_at, self.clock)
        )

    @property
    def outage(self) -> str:
        """Since when there is no answer, and why; "" where it answered."""
        return (
            f"{'no answer' if self.unreachable else 'an error'} since {self.since} ({self.error})" if self.error else ""
        )

    def describe(self) -> str:
        """Return when it was asked and since when there is no answer; "" where it answered."""
        when = f"last asked {self.age_s:.0f} s ago: " if self.at else ""  # `expire` forgets when
        return when + self.outage if self.error else ""


def fresh_s(created_at: str, clock: Clock = SYSTEM) -> float:
    """Return for how long readers take a stored answer about what was made at a time."""
    return OLD_FRESH_S if clock.now() - unix_time(created_at) > OLD_S else FRESH_S


def note(
    home: Path, run_id: str, backend: Backend, error: CloudtrainError | None = None, clock: Clock = SYSTEM
) -> None:
    """Note that a run's platform was asked just now, and its error where it gave no answer."""
    shared = backend.follow_s is not None
    before = last(home, run_id)
    if error is None and not shared and (before is None or not before.error):
        return
    path = _path(home, run_id)
    with suppress(OSError):
        if error is None:
            if before and before.shared and not before.error:
                os.utime(path, (clock.now(), clock.now()))
            else:
                _write(path, {"shared": shared}, clock)
            return
        since = before.since if before and before.error else f"{format_time(clock.now())[:19]}Z"
        data = {"error": error.message, "since": since, "unreachable": isinstance(error, Unreachable)}
        _write(path, {"shared": shared, **data}, clock)


def last(home: Path, run_id: str, clock: Clock = SYSTEM) -> Asked | None:
    """Return when a run's platform was last asked; None where that is not known."""
    path = _path(home, run_id)
    try:
        return Asked(path.stat().st_mtime, clock=clock, **json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def expire(home: Path, run_id: str) -> None:
    """Let the next reader ask at once: something has happened that changes the status."""
    with suppress(OSError):
        os.utime(_path(home, run_id), (0, 0))


def _path(home: Path, run_id: str) -> Path:
    return home / "runs" / run_id / "asked"


def _write(path: Path, data: dict[str, object], clock: Clock) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"asked.{os.getpid()}.new")
    new.write_text(json.dumps(data), "utf-8")
    os.utime(new, (clock.now(), clock.now()))
    new.replace(path)
