"""A limit on the calls of a platform, and the pauses while it does not answer."""

from __future__ import annotations

import random
import time

from cloudtrain.clock import SYSTEM, Clock

OUTAGE_S, OUTAGE_MAX_S = 1.0, 60.0  # before a platform that did not answer is asked again; doubled each time
SHARE, STRETCH_MAX = (
    0.10,
    20.0,
)  # of a processor that looks may take together; above it pauses grow, this much at the most
LAG_S = 0.5  # that an answer may wait for the thread that decides: on a machine that is busy, looks have to be fewer


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
