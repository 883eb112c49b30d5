"""When the watcher asks a platform: for one run its status and its log, for an account a limit on calls, and pauses.

When a run's platform was last asked, and whether it answered, serves all readers: `runs/<run>/asked` has the time as its
modification time, and the error where there was no answer.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.history.records import AttemptRecord
from cloudtrain.job.units import format_time, unix_time
from cloudtrain.runs.planning.attempts import FIRST_POLL_S, pause

SOON_S = 0.05  # the first pause between two questions when a change is expected; each one is twice as long
# The longest time until a request to cancel, or a new reader, is noticed; the shortest between two reads.
NOTICE_S = 0.2
# An attempt older than this is asked about so rarely, unless its platform is a simulator.
OLD_AFTER_S, OLD_S = 600.0, 30.0
SIMULATED_S = 1.0  # which wants to be asked more often than this
OUTAGE_S, OUTAGE_MAX_S = 1.0, 60.0  # before a platform that did not answer is asked again; doubled each time
# Of a processor that looks may take together; above it pauses grow, this much at the most.
SHARE, STRETCH_MAX = 0.10, 20.0
FRESH_S = 5.0  # an answer of this age is not asked for again
OLD_FRESH_S = 30.0  # the same for a run that is older than OLD_AFTER_S
LAG_S = 0.5  # that an answer may wait for the thread that decides: on a machine that is busy, looks have to be fewer


class Pace:
    """The pace for one attempt.

    A platform that is shared is asked once in `poll_s`, more often only after something that makes a change likely. Its
    log is read together with the status, and once in `follow_s` while somebody follows it. Other platforms are asked
    at every look, and a new attempt is looked at more often than an old one.
    """

    def __init__(
        self, backend: Backend, followed: Callable[[], bool], age_s: float = 0.0, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._shared = backend.follow_s is not None
        self._poll_s = max(backend.poll_s, FIRST_POLL_S)
        self._follow_s = max(backend.follow_s, NOTICE_S) if backend.follow_s is not None else 0.0
        self._followed = followed
        self._began = self._clock.monotonic() - age_s
        self._read_at = self._clock.monotonic()
        self._cancelled = False
        self._unanswered = 0  # questions in a row
        self.expect_change()

    def expect_change(self) -> None:
        """Ask at once, and soon again: something was submitted, cancelled or printed that changes the status."""
        self._pause_s, self._due = SOON_S, self._clock.monotonic()

    def expect_cancel(self) -> None:
        """Ask at once when a request to cancel is seen for the first time."""
        if not self._cancelled:
            self._cancelled = True
            self.expect_change()

    @property
    def status_is_due(self) -> bool:
        """Whether the platform is to be asked for the status now."""
        return not self._shared or self._clock.monotonic() >= self._due

    @property
    def log_is_due(self) -> bool:
        """Whether the log is to be read now, though the status is not due."""
        return self._shared and self._clock.monotonic() >= self._read_at + self._follow_s and self._followed()

    def asked(self) -> None:
        """Note that the status is asked for now."""
        moment = self._clock.monotonic()
        old = self._poll_s > SIMULATED_S and moment - self._began > OLD_AFTER_S
        pause_s = min(self._pause_s, max(self._poll_s, OLD_S) if old else self._poll_s)
        self._due = moment + pause_s * random.uniform(1.0, 1.05)  # homes that began together are spread in time
        self._pause_s = min(self._pause_s * 2, OLD_S)

    def answered(self, answer: bool) -> None:
        """Note whether the platform has said the status; after questions without an answer it is asked ever more rarely."""
        self._unanswered = 0 if answer else self._unanswered + 1
        if not answer:
            self._due = self._clock.monotonic() + outage_pause_s(self._unanswered)

    def read(self) -> None:
        """Note that the log was read just now."""
        self._read_at = self._clock.monotonic()

    def wait_s(self) -> float:
        """Return how long to wait before the next look."""
        now = self._clock.monotonic()
        if not self._shared:
            return pause(now - self._began, self._poll_s)
        until = min(self._due, self._read_at + self._follow_s) if self._followed() else self._due
        return max(until - now, FIRST_POLL_S)


def outage_pause_s(failures: int) -> float:
    """Return how long to wait after so many looks in a row without an answer."""
    return min(OUTAGE_S * 2.0 ** min(failures - 1, 20), OUTAGE_MAX_S) * random.uniform(0.9, 1.1)


class Budget:
    """Calls that may be made of one platform: so many a second, and as many at once after a quiet second."""

    def __init__(self, calls_per_s: float, clock: Clock = SYSTEM) -> None:
        self.calls_per_s, self._clock = calls_per_s, clock
        self._most = max(calls_per_s, 2.0)
        self._left = self._most
        self._at = self._clock.monotonic()

    def wait_s(self) -> float:
        """Return how long to wait until a call may be made, in seconds."""
        moment = self._clock.monotonic()
        self._left = min(self._most, self._left + (moment - self._at) * self.calls_per_s)
        self._at = moment
        return 0.0 if self._left >= 1 else (1 - self._left) / self.calls_per_s

    def take(self, calls: int) -> None:
        """Count calls; more than are left are paid by a longer wait."""
        self._left -= calls


class ProcessorShare:
    """How much longer pauses are, so that looks take at most SHARE of a processor, and less where others leave less."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.stretch, self._clock = 1.0, clock
        self._measured = (self._clock.monotonic(), time.process_time())
        self._lag_s = 0.0

    def note_lag(self, lag_s: float) -> None:
        """Note how long something waited for the thread that decides."""
        self._lag_s = max(self._lag_s, lag_s)

    def measure(self) -> None:
        """Adapt the pauses once a second."""
        moment, used = self._clock.monotonic(), time.process_time()
        if moment - self._measured[0] >= 1:
            self.adapt((used - self._measured[1]) / (moment - self._measured[0]), self._lag_s)
            self._measured, self._lag_s = (moment, used), 0.0

    def adapt(self, share: float, lag_s: float) -> None:
        """Adapt the pauses to the share of a processor that was used, and to the longest lag meanwhile."""
        change = min(max(share / SHARE, lag_s / LAG_S, 0.5), 2.0)
        self.stretch = min(max(1.0, self.stretch * change), STRETCH_MAX)


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
    return OLD_FRESH_S if clock.now() - unix_time(created_at) > OLD_AFTER_S else FRESH_S


def note_contact(
    home: Path, run_id: str, backend: Backend, error: CloudtrainError | None = None, clock: Clock = SYSTEM
) -> None:
    """Note that a run's platform was asked just now, and its error where it gave no answer."""
    shared = backend.follow_s is not None
    before = last_contact(home, run_id)
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


def last_contact(home: Path, run_id: str, clock: Clock = SYSTEM) -> Asked | None:
    """Return when a run's platform was last asked; None where that is not known."""
    path = _path(home, run_id)
    try:
        return Asked(path.stat().st_mtime, clock=clock, **json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def expire_contact(home: Path, run_id: str) -> None:
    """Let the next reader ask at once: something has happened that changes the status."""
    with suppress(OSError):
        os.utime(_path(home, run_id), (0, 0))


def _path(home: Path, run_id: str) -> Path:
    return Path(f"{home}/runs/{run_id}/asked")  # `/` would take longer than to ask for its time


def _write(path: Path, data: dict[str, object], clock: Clock) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"asked.{os.getpid()}.new")
    new.write_text(json.dumps(data), "utf-8")
    os.utime(new, (clock.now(), clock.now()))
    new.replace(path)
