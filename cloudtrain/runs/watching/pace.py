"""When the watcher of a run asks its platform for the status, and when it reads the log."""

from __future__ import annotations

import random
from collections.abc import Callable

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.runs.planning.attempts import FIRST_POLL_S, pause
from cloudtrain.runs.watching import rate_limit

SOON_S = 0.05  # the first pause between two questions when a change is expected; each one is twice as long
# The longest time until a request to cancel, or a new reader, is noticed; the shortest between two reads.
NOTICE_S = 0.2
# An attempt older than this is asked about so rarely, unless its platform is a simulator.
OLD_AFTER_S, OLD_S = 600.0, 30.0
SIMULATED_S = 1.0  # which wants to be asked more often than this


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
            self._due = self._clock.monotonic() + rate_limit.outage_pause_s(self._unanswered)

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
