"""The log of a run as numbered lines that can be scanned at anywhere: read once in order, kept in an unnamed file.

A backend gives its lines in order, behind a cursor. What was read of them is written down here, so that a million lines
are browsed by their numbers: a page holds a window of them, this process eight bytes and three small numbers of each.
"""

from __future__ import annotations

import tempfile
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap

from cloudtrain.events import MARK, LogLine, parse
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run

BATCH = 5000  # lines that appear at once
SEARCH_BYTES = 4 << 20  # bytes that are searched at once
MAX_LINE = 16 << 10  # characters that are kept of a line
MAX_LOGBOOKS = 6  # books of this process


@dataclass(frozen=True)
class Line:
    """One line of a log as the book keeps it; `number` counts from 0."""

    number: int
    at: str
    attempt: int
    node: int
    rank: int
    text: str


@dataclass(frozen=True)
class LineFilter:
    """Which lines: of a node, of a rank on it, with words in them (any case); all of them without."""

    node: int | None = None
    rank: int | None = None
    text: str = ""

    @property
    def everything(self) -> bool:
        return self.node is None and self.rank is None and not self.text


@dataclass
class Matches:
    """The numbers of the lines that were wanted, as far as was scanned."""

    lines: array[int] = field(default_factory=lambda: array("Q"))
    scanned: int = 0


class Logbook:
    """The lines of one run's log that were read so far. Any thread may ask; one at a time reads on."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.used_at = time.monotonic()
        self.complete = False  # nothing more will come
        self.ranks: set[tuple[int, int]] = set()  # (node, rank) that have spoken
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and is gone with this object
        self._line_ends = array("Q", [0])
        self._origins = (array("h"), array("h"), array("i"))  # attempt, node, rank
        self._cursor: str | None = None
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._matches: OrderedDict[LineFilter, Matches] = OrderedDict()

    @property
    def count(self) -> int:
        """How many lines were read."""
        return len(self._line_ends) - 1

    def read_on(self, store: Store) -> None:
        """Read what is new; blocking. Returns at once where another thread does so."""
        run = Run(self.run_id, store)
        final = run.record.status.state.final  # asked first: what was written until then is read below
        if (self.complete and final) or not self._reading.acquire(blocking=False):
            return
        try:
            batch: list[LogLine] = []
            for line in run.logs(after=self._cursor, raw=True):
                batch.append(line)
                if len(batch) >= BATCH:
                    self._write(batch)
                    batch = []
                    time.sleep(0)  # pages are drawn meanwhile
            self._write(batch)
            self.complete = final  # until somebody resumes it
        finally:
            self._reading.release()

    def window(self, line_filter: LineFilter, first: int, most: int) -> tuple[list[Line], int]:
        """Return lines from the `first` of those that are wanted on (from the end where it is negative), and how many are
        wanted in all."""
        self.used_at = time.monotonic()
        numbers: Sequence[int] = range(self.count) if line_filter.everything else self._find_matches(line_filter).lines
        total = len(numbers)
        begin = max(0, total + first) if first < 0 else min(first, max(0, total - 1))
        with self._writing:
            return [self._line(number) for number in numbers[begin : min(begin + most, total)]], total

    def close(self) -> None:
        with self._reading, self._writing:
            self.complete = True
            self._file.close()

    def _write(self, lines: Sequence[LogLine]) -> None:
        if not lines:
            return
        with self._writing:
            end, pieces = self._line_ends[-1], []
            attempts, nodes, ranks = self._origins
            for timestamp, node, rank, _, text, cursor in lines:
                self._cursor = cursor
                if text.startswith(MARK) and parse(text):
                    continue  # an event: the timeline and the curves tell it
                piece = f"{timestamp[11:19]} {text[:MAX_LINE]}\n".encode("utf-8", "replace")
                pieces.append(piece)
                end += len(piece)
                self._line_ends.append(end)
                attempts.append(int(cursor.partition("/")[0]))
                nodes.append(node)
                ranks.append(rank)
                self.ranks.add((node, rank))
            self._file.seek(0, 2)
            self._file.write(b"".join(pieces))
            self._file.flush()

    def _line(self, number: int) -> Line:
        begin, end = self._line_ends[number], self._line_ends[number + 1]
        self._file.seek(begin)
        timestamp, _, text = self._file.read(end - begin - 1).decode("utf-8", "replace").partition(" ")
        attempt, node, rank = (column[number] for column in self._origins)
        return Line(number, timestamp, attempt, node, rank, text)

    def _find_matches(self, line_filter: LineFilter) -> Matches:
        """Return what was found of the lines that are wanted, after looking at what was read since the last look."""
        with self._writing:
            matches = self._matches.setdefault(line_filter, Matches())
            self._matches.move_to_end(line_filter)
            while len(self._matches) > 8:
                self._matches.popitem(last=False)
            begin, end = matches.scanned, self.count
            numbers: Iterator[int] = iter(range(begin, end))
            if line_filter.text and end > begin:
                numbers = self._search(line_filter.text, begin, end)
            _, nodes, ranks = self._origins
            if line_filter.node is not None:
                numbers = (n for n in numbers if nodes[n] == line_filter.node)
            if line_filter.rank is not None:
                numbers = (n for n in numbers if ranks[n] == line_filter.rank)
            matches.lines.extend(numbers)
            matches.scanned = end
        return matches

    def _search(self, text: str, begin: int, end: int) -> Iterator[int]:
        """Yield the numbers of lines with some words in them (any case of A to Z): the file is searched in large pieces."""
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
    """Return the book of a run, which its pages share; those that were not scanned at for longest are given up."""
    logbook = _logbooks.get(run_id)
    if logbook is None:
        logbook = _logbooks[run_id] = Logbook(run_id)
        while len(_logbooks) > MAX_LOGBOOKS:
            oldest = min(
                _logbooks.values(), key=lambda other: other.used_at if other is not logbook else logbook.used_at + 1
            )
            del _logbooks[oldest.run_id]  # its file is gone with it
    return logbook
