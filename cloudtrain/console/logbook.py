"""The log of a run with numbered lines for random access: read once, indexed, and kept in an unnamed file.

A backend returns lines in order, after a cursor. This module stores them, so that a page can show any window of a million
lines. In memory a line takes sixteen bytes and three small numbers.
"""

from __future__ import annotations

import tempfile
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap

from cloudtrain.clock import SYSTEM
from cloudtrain.errors import Unreachable
from cloudtrain.events import LogLine, without_event
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run

BATCH = 5000  # lines stored at once
SEARCH_BYTES = 4 << 20  # searched at once
MAX_LINE = 16 << 10  # characters stored of a line
MAX_LOGBOOKS = 6  # in this process


@dataclass(frozen=True)
class Line:
    """One line of a log; `number` counts the lines of all nodes from 0, `seq` is its number on its node."""

    number: int
    seq: int
    at: str
    attempt: int
    node: int
    rank: int
    text: str


@dataclass(frozen=True)
class LineFilter:
    """A filter for lines: of a node, of a rank, containing a text (any case). Without values it matches all lines."""

    node: int | None = None
    rank: int | None = None
    text: str = ""

    @property
    def everything(self) -> bool:
        return self.node is None and self.rank is None and not self.text


@dataclass
class Matches:
    """The numbers of the matching lines among the first `scanned` lines."""

    lines: array[int] = field(default_factory=lambda: array("Q"))
    scanned: int = 0


class Logbook:
    """The lines of one run's log read so far. Any thread may query it; one thread at a time reads on."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.used_at = SYSTEM.monotonic()
        self.complete = False  # the run is final and all lines are read
        self.ranks: set[tuple[int, int]] = set()  # (node, rank) of the lines so far
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - unnamed, deleted with this object
        self._line_ends = array("Q", [0])
        self._origins = (array("h"), array("h"), array("i"), array("q"))  # attempt, node, rank, seq
        self._cursor: str | None = None
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._matches: OrderedDict[LineFilter, Matches] = OrderedDict()

    @property
    def count(self) -> int:
        """The number of lines read so far."""
        return len(self._line_ends) - 1

    def read_on(self, store: Store) -> None:
        """Read the new lines; blocking. Returns at once where another thread does so."""
        run = Run(self.run_id, store)
        final = run.record.status.state.final  # read before the log: a final run has written all its lines
        if (self.complete and final) or not self._reading.acquire(blocking=False):
            return
        try:
            batch: list[LogLine] = []
            with suppress(Unreachable):  # the overview says that the platform does not answer
                for line in run.logs(after=self._cursor, raw=True):
                    batch.append(line)
                    if len(batch) >= BATCH:
                        self._write(batch)
                        batch = []
                        store.clock.sleep(0)  # lets other threads draw pages
            self._write(batch)
            self.complete = final  # until a resume
        finally:
            self._reading.release()

    def window(self, line_filter: LineFilter, first: int, most: int) -> tuple[list[Line], int]:
        """Return up to `most` matching lines from number `first` (from the end where negative), and the number of matches."""
        self.used_at = SYSTEM.monotonic()
        numbers: Sequence[int] = range(self.count) if line_filter.everything else self._find_matches(line_filter).lines
        total = len(numbers)
        begin = max(0, total + first) if first < 0 else min(first, max(0, total - 1))
        with self._writing:
            return [self._line(number) for number in numbers[begin : min(begin + most, total)]], total

    def find(self, seq: int, node: int | None) -> int:
        """Return the number of the first line of a node (None: of any) whose `seq` is this one or higher, else of the last."""
        _, nodes, _, seqs = self._origins
        found = (number for number in range(self.count) if seqs[number] >= seq and node in (None, nodes[number]))
        return next(found, max(0, self.count - 1))

    def close(self) -> None:
        with self._reading, self._writing:
            self.complete = True
            self._file.close()

    def _write(self, lines: Sequence[LogLine]) -> None:
        if not lines:
            return
        with self._writing:
            end, pieces = self._line_ends[-1], []
            attempts, nodes, ranks, seqs = self._origins
            for timestamp, node, rank, seq, text, cursor in lines:
                self._cursor = cursor
                if (shown := without_event(text)) is None:
                    continue  # an event: shown in the timeline and the charts
                piece = f"{timestamp[11:19]} {shown[:MAX_LINE]}\n".encode("utf-8", "replace")
                pieces.append(piece)
                end += len(piece)
                self._line_ends.append(end)
                attempts.append(int(cursor.partition("/")[0]))
                nodes.append(node)
                ranks.append(rank)
                seqs.append(seq)
                self.ranks.add((node, rank))
            self._file.seek(0, 2)
            self._file.write(b"".join(pieces))
            self._file.flush()

    def _line(self, number: int) -> Line:
        begin, end = self._line_ends[number], self._line_ends[number + 1]
        self._file.seek(begin)
        timestamp, _, text = self._file.read(end - begin - 1).decode("utf-8", "replace").partition(" ")
        attempt, node, rank, seq = (column[number] for column in self._origins)
        return Line(number, seq, timestamp, attempt, node, rank, text)

    def _find_matches(self, line_filter: LineFilter) -> Matches:
        """Return the matching lines, after scanning the lines read since the last call."""
        with self._writing:
            matches = self._matches.setdefault(line_filter, Matches())
            self._matches.move_to_end(line_filter)
            while len(self._matches) > 8:
                self._matches.popitem(last=False)
            begin, end = matches.scanned, self.count
            numbers: Iterator[int] = iter(range(begin, end))
            if line_filter.text and end > begin:
                numbers = self._search(line_filter.text, begin, end)
            _, nodes, ranks, _ = self._origins
            if line_filter.node is not None:
                numbers = (n for n in numbers if nodes[n] == line_filter.node)
            if line_filter.rank is not None:
                numbers = (n for n in numbers if ranks[n] == line_filter.rank)
            matches.lines.extend(numbers)
            matches.scanned = end
        return matches

    def _search(self, text: str, begin: int, end: int) -> Iterator[int]:
        """Yield the numbers of the lines that contain a text (any case of A to Z); searches the file in large pieces."""
        needle = text.encode("utf-8", "replace").lower()
        with mmap(self._file.fileno(), 0, access=ACCESS_READ) as view:
            while begin < end:
                end_line = max(
                    begin + 1, bisect_right(self._line_ends, self._line_ends[begin] + SEARCH_BYTES, begin, end + 1) - 1
                )
                base = self._line_ends[begin]
                piece = view[base : self._line_ends[end_line]].lower()
                offset = piece.find(needle)
                while offset >= 0:
                    number = bisect_right(self._line_ends, base + offset, begin, end_line) - 1
                    yield number
                    offset = piece.find(needle, self._line_ends[number + 1] - base)
                begin = end_line


_logbooks: OrderedDict[str, Logbook] = OrderedDict()


def open_logbook(run_id: str) -> Logbook:
    """Return the logbook of a run, shared by its pages; the least recently used ones are closed."""
    logbook = _logbooks.get(run_id)
    if logbook is None:
        logbook = _logbooks[run_id] = Logbook(run_id)
        while len(_logbooks) > MAX_LOGBOOKS:
            oldest = min(
                _logbooks.values(), key=lambda other: other.used_at if other is not logbook else logbook.used_at + 1
            )
            del _logbooks[oldest.run_id]  # deletes its file
    return logbook
