"""Detect stalled ranks by their processor time, and print their stacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from . import processes
from .usage import STIME, UTIME

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from .ranks import Ranks

BUSY = 0.02  # of a processor: less is a process that waits, with threads in it that look at a clock
STACKS_S = 10.0  # how long ranks may take to write their stacks before they are killed


class StallDetector:
    """Watches the processor time that ranks and their children use; `limit_s` says how closely."""

    def __init__(self, limit_s: float, pids: Iterable[int], now: float) -> None:
        self._every_s = min(10.0, max(1.0, limit_s / 10))
        self._at = now
        self._used = dict.fromkeys(pids, 0.0)
        self._busy_at = dict.fromkeys(self._used, now)

    def look(self, running: Iterable[int], now: float) -> bool:
        """Take note of what the running ranks have used, where it is time to; True when it was."""
        elapsed = now - self._at
        if elapsed < self._every_s:
            return False
        self._at = now
        alive = set(running)
        for pid in list(self._used):
            if pid not in alive:
                del self._used[pid], self._busy_at[pid]  # one that has ended well waits for nothing
                continue
            used = _used_s(pid)
            if abs(used - self._used[pid]) >= BUSY * elapsed:  # less than before: a child has ended
                self._busy_at[pid] = now
            self._used[pid] = used
        return True

    def idle_s(self, now: float) -> float:
        """Return for how long the idlest rank has done nothing."""
        return now - min(self._busy_at.values(), default=now)


def show_stacks(ranks: Ranks) -> None:
    """Let the ranks write the stacks of all their threads, and end; one that was stopped is continued to do so.

    Python's faulthandler writes them at SIGABRT. No core is left behind.
    """
    for pid in ranks.running:
        _leave_no_core(pid)
    ranks.signal(signal.SIGABRT)
    ranks.signal(signal.SIGCONT)


def _leave_no_core(pid: int) -> None:
    try:
        import resource

        resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
    except (ImportError, AttributeError, OSError, ValueError):
        pass  # it is gone, or this is not Linux: the limit stays as it is


def _used_s(pid: int) -> float:
    """Return the processor seconds of a process and of its living descendants."""
    stats = [*processes.descendants(pid).values(), processes.stat(pid)]
    return sum(int(stat[UTIME]) + int(stat[STIME]) for stat in stats if stat) / os.sysconf("SC_CLK_TCK")
