"""The clock that everything reads that waits, retries, polls, expires or decides by an age; tests pass another one."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime


class Clock:
    """The system's clock."""

    def now(self) -> float:
        """Return the seconds since 1970 by the wall clock, which may be set back."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds since some moment; they never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds; blocking."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        """Wait until an event is set, for some seconds at most; blocking. Returns whether it is set."""
        return event.wait(seconds)

    def utc(self) -> datetime:
        """Return the wall clock's time in UTC."""
        return datetime.fromtimestamp(self.now(), UTC)


SYSTEM = Clock()
