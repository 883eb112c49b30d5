"""A clock of the launcher that stands still until a test moves it."""

from __future__ import annotations

import threading

from launcher.clock import Clock


class VirtualClock(Clock):
    """Whoever sleeps or waits moves it, and goes on at once."""

    def __init__(self) -> None:
        self._wall, self._monotonic = 1.6e9, 1000.0

    def now(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._wall += seconds
        self._monotonic += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        if not event.is_set():
            self.advance(seconds or 0.0)
        return event.is_set()
