"""Find nodes that have been slower than the others for minutes, by step times and GPU clocks; no I/O.

Each node reports its figures with its heartbeats (`Pace`), and node 0 compares them (`Stragglers`). Ranks that wait for
each other in every step have equal step times: there the GPU clocks tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..clock import Clock

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

SLOW_SHARE = 0.8  # of the median speed: a node below is slow
SLOW_S = 600.0  # for so long, before it is reported
WINDOW_S = 120.0  # in which the steps of a rank are counted
MARK_S = 1.0  # between two step numbers of a rank that are kept
MOST_LINES = 20  # of one read that are searched
STEP = re.compile(
    rb'"(?:global_)?step": ?(\d{1,15})\b|\b(?:global[ _]?)?(?:step|iter|iteration)\b[ =:#\[(]{1,12}(\d{1,15})\b',
    re.IGNORECASE,
)


class Pace:
    """Seconds per step of a node's ranks, by the step numbers in the lines that they print."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[int, list[tuple[float, int]]] = {}  # rank -> when it had printed which step

    def printed(self, rank: int, lines: Sequence[bytes]) -> None:
        """Take note of the newest step number in some lines of a rank."""
        now, marks = self._clock.monotonic(), self._marks.setdefault(rank, [])
        if marks and now - marks[-1][0] < MARK_S:
            return
        for line in reversed(lines[-MOST_LINES:]):
            if match := STEP.search(line[:1000]):
                step = int(match[1] or match[2])
                if marks and step < marks[-1][1]:
                    marks.clear()  # another epoch, or a restart
                marks.append((now, step))
                while len(marks) > 2 and marks[1][0] < now - WINDOW_S:
                    del marks[0]
                return

    @property
    def step_s(self) -> float | None:
        """Seconds per step of the slowest rank; None where no two steps are known."""
        spans = [(marks[0], marks[-1]) for marks in self._marks.values() if marks]
        return max(
            ((end - begin) / (last - first) for (begin, first), (end, last) in spans if last > first), default=None
        )


class Stragglers:
    """The nodes' newest figures: `step_s`, `clock` as a share of the GPU's highest, and `slowdown`, what nvidia-smi says."""

    def __init__(self) -> None:
        self._figures: dict[int, Mapping[str, Any]] = {}
        self._since: dict[tuple[str, int], float] = {}
        self._reported: set[tuple[str, int]] = set()

    def add(self, node: int, figures: Mapping[str, Any]) -> None:
        """Record what a node has reported last."""
        self._figures[node] = figures

    def look(self, now: float) -> list[tuple[int, str]]:
        """Return the nodes that have been slow for 10 minutes since the last call, with what is slow; each once."""
        found = []
        for key in ("step_s", "clock"):
            values = {node: float(each[key]) for node, each in self._figures.items() if each.get(key)}
            speeds = {node: 1 / value if key == "step_s" else value for node, value in values.items()}
            median = sorted(speeds.values())[len(speeds) // 2] if len(speeds) > 1 else 0.0  # of two the faster one
            for node, speed in speeds.items():
                if speed >= SLOW_SHARE * median:
                    self._since.pop((key, node), None)
                    self._reported.discard((key, node))
                elif now - self._since.setdefault((key, node), now) >= SLOW_S and (key, node) not in self._reported:
                    self._reported.add((key, node))
                    found.append((node, self._describe(key, node, values[node], speed / median)))
        return found

    def _describe(self, key: str, node: int, value: float, share: float) -> str:
        what = f"{value:.3g} s per step" if key == "step_s" else f"GPU clock at {100 * value:.0f} % of its highest"
        cause = self._figures[node].get("slowdown")
        slower = f"{100 * (1 - share):.0f} % slower than the median of the nodes"
        return f"{what}, {slower}, for {SLOW_S / 60:g} minutes" + (f"; {cause}" if cause else "")
