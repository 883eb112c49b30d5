"""A clock for tests: its time passes at once, and only while somebody sleeps or waits."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import thread as pools
from typing import NamedTuple

from cloudtrain.clock import SYSTEM, Clock

EPOCH = 1_600_000_000.0
STUCK_S = 120.0  # of real time: no thread of a test works for so long between two waits
LOOK_S = 0.002  # of real time: how often a waiting thread looks whether a thread has set its event or has ended


class _Wait(NamedTuple):
    """What a thread waits for."""

    deadline: float
    number: int  # of all waits, in the order of their beginning
    is_over: Callable[[], bool]


class VirtualClock(Clock):
    """A clock whose time moves when every thread that it knows waits, to the earliest deadline of them.

    It knows the threads of `start`, and each other one from its first `sleep` or `wait` on until it ends or, in a pool,
    has no work left. They run one at a time, in the order of their deadlines, then in the order in which they began to
    wait. A known thread that waits for anything else stops the time: let it `join` other threads through the clock.

    Args:
        now: seconds since 1970 at the beginning.
    """

    def __init__(self, now: float = EPOCH) -> None:
        self._wall, self._monotonic = now, 1000.0  # of `monotonic` nobody may take 0 for a time long ago
        self.slept: list[float] = []  # the seconds of each `sleep` and of each `wait` that has a limit
        self._changed = threading.Condition()
        self._known: set[threading.Thread] = set()
        self._waiting: dict[threading.Thread, _Wait] = {}
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back where negative; no time passes."""
        self._wall += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._wait(self._monotonic + max(seconds, 0.0), lambda: False)

    def wait(self, event: threading.Event, seconds: float | None = None) -> bool:
        if seconds is not None:
            self.slept.append(seconds)
        if not event.is_set():
            self._wait(float("inf") if seconds is None else self._monotonic + max(seconds, 0.0), event.is_set)
        return event.is_set()

    def start(self, *targets: Callable[[], object]) -> list[threading.Thread]:
        """Start a thread for each function; no time passes before each one waits or has ended."""
        threads = [threading.Thread(target=target, daemon=True) for target in targets]
        with self._changed:
            self._known.update(threads)
            for thread in threads:
                thread.start()
        return threads

    def join(self, *threads: threading.Thread) -> None:
        """Wait until threads have ended; time passes meanwhile."""
        self._wait(float("inf"), lambda: not any(thread.is_alive() for thread in threads))

    def _wait(self, deadline: float, is_over: Callable[[], bool]) -> None:
        me, stuck_at = threading.current_thread(), SYSTEM.monotonic() + STUCK_S
        with self._changed:
            self._known.add(me)
            self._waiting[me] = _Wait(deadline, next(self._numbers), is_over)
            try:
                while self._next() is not me:
                    self._changed.wait(LOOK_S)
                    if SYSTEM.monotonic() > stuck_at:
                        raise RuntimeError(self._describe_stuck(me))
                if not is_over():
                    self._move_to(deadline)
            finally:
                del self._waiting[me]
                self._changed.notify_all()

    def _next(self) -> threading.Thread | None:
        """Return the thread that goes on now; None while a known thread works, or where nothing is to come."""
        self._known = {each for each in self._known if each.is_alive() and not _is_idle(each)}
        if self._known != self._waiting.keys():
            return None
        rank = {each: (-1.0 if wait.is_over() else wait.deadline, wait.number) for each, wait in self._waiting.items()}
        first = min(rank, key=rank.__getitem__)
        return first if rank[first][0] < float("inf") else None

    def _move_to(self, moment: float) -> None:
        passed = max(moment - self._monotonic, 0.0)
        self._monotonic += passed
        self._wall += passed

    def _describe_stuck(self, me: threading.Thread) -> str:
        busy = sorted(each.name for each in self._known - self._waiting.keys())
        return f"{me.name} waits for ever: " + (
            f"the time stands still until {', '.join(busy)} waits through the clock or ends"
            if busy
            else "no thread is left that could set its event"
        )


def _is_idle(thread: threading.Thread) -> bool:
    """Return whether a thread of a pool waits for work."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is pools._worker.__code__
