"""When the watcher asks a platform: for one run its status and its log, for an account a limit on calls, and pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.runs.planning.attempts import FIRST_POLL_S, pause

SOON_S = 0.05  # the first pause between two questions when a change is expected; each one is twice as long
# The longest time until a request to cancel, or a new reader, is noticed; the shortest between two reads.
NOTICE_S = 0.2
# An attempt older than this is asked about so rarely, unless its platform is a simulator.
OLD_AFTER_S, OLD_S = 600.0, 30.0
SIMULATED_S = 1.0  # which wants to be asked more often than this
OUTAGE_S, OUTAGE_MAX_S = 1.0, 60.0  # before a platform that did not answer is asked again; doubled each time
SHARE, STRETCH_MAX = (
    0.10,
    20.0,
)  # of a processor that looks may take together; above it pauses grow, this much at the most
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
