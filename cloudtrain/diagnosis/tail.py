"""Keep the last lines of every rank while a log is read."""

from __future__ import annotations

from collections import deque

from cloudtrain.events import MARK, PLATFORM, LogLine

LINES = 400  # of each rank, if the reader names no other number
RANKS = 512  # more ranks than these are not kept


class Tail:
    """The last lines of every rank and of the launchers, in bounded memory."""

    def __init__(self, most: int = LINES) -> None:
        self._most = most
        self._lines: dict[tuple[int, int], deque[LogLine]] = {}

    def add(self, line: LogLine) -> None:
        """Keep a line, unless it is the launcher's marked event."""
        if line.text.startswith(MARK):
            if (
                '"state":"STARTING"' in line.text
            ):  # what the platform printed before is of an earlier start, or of setup
                self._lines.pop((PLATFORM, -1), None)
            return
        rank_lines = self._lines.get((line.node, line.rank))
        if rank_lines is None:
            if len(self._lines) >= RANKS:
                return
            rank_lines = self._lines[line.node, line.rank] = deque(maxlen=self._most)
        rank_lines.append(line)

    def lines(self) -> list[LogLine]:
        """Return the kept lines: each rank's in order, the rank that wrote first in front."""
        return [line for rank_lines in self._lines.values() for line in rank_lines]
