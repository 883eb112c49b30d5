"""The age of the newest uploaded checkpoint, and the alarm when it gets too old.

The supervisor asks once a second, from its own thread: what uploads may hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..clock import SYSTEM, Clock

TOO_OLD = 2.0  # intervals
UNKNOWN_S = 900.0  # the interval where it is given in steps, before two checkpoints have been seen


class CheckpointAge:
    """`interval_s` is checkpoint.every, None where it is given in steps: then it is measured from what is written here.

    With `expected` checkpoints are missed before the first has come too. `report` takes a kind of event and its data.
    """

    def __init__(
        self,
        interval_s: float | None,
        expected: bool,
        report: Callable[..., None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._interval_s, self._expected, self._report, self._clock = interval_s, expected, report, clock
        self._measured_s = 0.0
        self._seen: dict[str, float] = {}  # mark -> when it was first seen here
        self._newest_at: float | None = None  # when the newest one in the output was written here
        self._alarm_at: float | None = None
        self._doing = ("", 0.0)  # the uploader's current step, and since when
        self._problem = ""
        self._lock = threading.Lock()

    def begin(self, has_checkpoint: bool) -> None:
        """Training begins; `has_checkpoint` says whether the output has one already."""
        with self._lock:
            if has_checkpoint or self._expected:
                self._newest_at = self._clock.monotonic()

    def written(self, mark: str) -> None:
        """A checkpoint is whole on this node."""
        with self._lock:
            now = self._clock.monotonic()
            if mark in self._seen:
                return
            if self._seen:
                self._measured_s = max(self._measured_s, now - max(self._seen.values()))
            self._seen[mark] = now
            if self._newest_at is None:
                self._newest_at = now  # from here on one is missed

    def arrived(self, mark: str) -> None:
        """A checkpoint is whole in the output."""
        with self._lock:
            now = self._clock.monotonic()
            at = self._seen.get(mark, now)
            self._newest_at, self._alarm_at = max(at, self._newest_at or at), None
        self._report("checkpoint", stored=mark.rpartition("/")[0], seconds=round(now - at, 3))

    def doing(self, action: str) -> None:
        """The uploader begins something; "" when it waits for its next turn."""
        self._doing = (action, self._clock.monotonic())

    def went(self, problem: str) -> None:
        """The uploader's last turn ended so; "" when nothing is left to do."""
        self._problem = problem

    @property
    def age_s(self) -> float | None:
        """Seconds since the newest checkpoint in the output was written; None while none is expected."""
        with self._lock:
            return None if self._newest_at is None else self._clock.monotonic() - self._newest_at

    def look(self) -> None:
        """Report an alarm when the newest one is older than twice the interval, or the uploader hangs for so long before
        one is expected; and again after each such time."""
        now = self._clock.monotonic()
        action, since = self._doing
        age_s, limit_s = self.age_s, TOO_OLD * (self._interval_s or self._measured_s or UNKNOWN_S)
        if age_s is None and not action:
            return
        if (now - since if age_s is None else age_s) < limit_s:
            return
        if self._alarm_at is not None and now - self._alarm_at < limit_s:
            return
        self._alarm_at = now
        slow = f"{action} has taken {now - since:.0f} s so far"
        if age_s is None:
            self._report("alarm", reason=f"{slow}: files are not uploaded to the output")
            return
        why = self._problem or (slow if action else "no checkpoint has been written since")
        reason = (
            f"the newest checkpoint in the output is {age_s:.0f} s old, more than twice the expected interval: {why}"
        )
        self._report("alarm", reason=reason)
