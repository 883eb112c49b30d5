"""The clock of everything in this folder that waits, polls or expires; tests give another one.

cloudtrain/clock.py has the same interface.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False  # importing threading would cost the guard a millisecond
if TYPE_CHECKING:
    import threading


class Clock:
    """The machine's clock."""

    def now(self) -> float:
        """Return seconds since 1970, by a clock that may be set."""
        return time.time()  # noqa: TID251

    def monotonic(self) -> float:
        """Return seconds since some moment, by a clock that only runs forward."""
        return time.monotonic()  # noqa: TID251

    def sleep(self, seconds: float) -> None:
        """Block for so long."""
        time.sleep(seconds)  # noqa: TID251

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        """Block until the event is set, for at most so long; return whether it is set."""
        return event.wait(seconds)


SYSTEM = Clock()
