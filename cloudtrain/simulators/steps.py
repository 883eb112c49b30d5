"""Runs what a simulated platform does by itself: generators that yield until when they have nothing to do.

A test may step through them with a clock of its own instead of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.clock import SYSTEM, Clock

TICK_S = 0.02  # how often it is looked at what others have done meanwhile
Steps = Iterator[float]  # of times, on the monotonic clock


def follow(steps: Steps, clock: Clock = SYSTEM) -> None:
    """Go through all steps; blocking."""
    for due in steps:
        clock.sleep(max(0.0, min(TICK_S, due - clock.monotonic())))
