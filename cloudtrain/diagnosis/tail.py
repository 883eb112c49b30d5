"""The last lines of every rank, kept while a log goes by."""

from __future__ import annotations

from collections import deque

from cloudtrain.events import MARK, LogLine

LINES = 400  # of each rank
RANKS = 512  # of so many; what more of them say is not kept


class Tail:
    """The last lines of every rank and of the launchers, as a log goes by; memory is bounded."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], deque[LogLine]] = {}

    def add(self, line: LogLine) -> None:
        if line.text.startswith(MARK):
            return
        kept = self._lines.get((line.node, line.rank))
        if kept is None:
            if len(self._lines) >= RANKS:
                return
            kept = self._lines[line.node, line.rank] = deque(maxlen=LINES)
        kept.append(line)

    def lines(self) -> list[LogLine]:
        """Return what was kept, each rank's lines in order, the rank that spoke first in front."""
        return [line for lines in self._lines.values() for line in lines]
