"""A limit on the calls of a platform, and the pauses while it does not answer."""

from __future__ import annotations

import random
import time

OUTAGE_S, OUTAGE_MAX_S = 1.0, 60.0  # before a platform that did not answer is asked again; doubled each time
LOGS_PER_S = 5.0  # logs that are read of one platform, at least; those of services have limits of their own
CALLS_PER_S = 50.0  # of a backend that names no limit


def outage_pause_s(failures: int) -> float:
    """Return how long to wait after so many looks in a row without an answer."""
    return min(OUTAGE_S * 2.0 ** min(failures - 1, 20), OUTAGE_MAX_S) * random.uniform(0.9, 1.1)


class Budget:
    """Calls that may be made of one platform: so many a second, and as many at once after a quiet second."""

    def __init__(self, calls_per_s: float) -> None:
        self.calls_per_s = calls_per_s
        self._most = max(calls_per_s, 2.0)
        self._left = self._most
        self._at = time.monotonic()

    def wait_s(self) -> float:
        """Return how long to wait until a call may be made, in seconds."""
        moment = time.monotonic()
        self._left = min(self._most, self._left + (moment - self._at) * self.calls_per_s)
        self._at = moment
        return 0.0 if self._left >= 1 else (1 - self._left) / self.calls_per_s

    def take(self, calls: int) -> None:
        """Count calls; more than are left are paid by a longer wait."""
        self._left -= calls
