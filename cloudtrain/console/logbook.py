"""The log of a run as numbered lines that can be looked at anywhere: read once in order, kept in an unnamed file.

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
PIECE = 4 << 20  # bytes that are searched at once
LONGEST = 16 << 10  # characters that are kept of a line
KEPT = 6  # books of this process


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
class Wanted:
    """Which lines: of a node, of a rank on it, with words in them (any case); all of them without."""

    node: int | None = None
    rank: int | None = None
    words: str = ""

    @property
    def everything(self) -> bool:
        return self.node is None and self.rank is None and not self.words


@dataclass
class Found:
    """The numbers of the lines that were wanted, as far as was looked."""

    lines: array[int] = field(default_factory=lambda: array("Q"))
    looked: int = 0


class Logbook:
    """The lines of one run's log that were read so far. Any thread may ask; one at a time reads on."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.used = time.monotonic()
        self.whole = False  # nothing more will come
        self.people: set[tuple[int, int]] = set()  # (node, rank) that have spoken
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and is gone with this object
        self._ends = array("Q", [0])
        self._who = (array("h"), array("h"), array("i"))  # attempt, node, rank
        self._cursor: str | None = None
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._found: OrderedDict[Wanted, Found] = OrderedDict()

    @property
    def count(self) -> int:
        """How many lines were read."""
        return len(self._ends) - 1

    def read_on(self, store: Store) -> None:
        """Read what is new; blocking. Returns at once where another thread does so."""
        run = Run(self.run_id, store)
        final = run.record.status.state.final  # asked first: what was written until then is read below
        if (self.whole and final) or not self._reading.acquire(blocking=False):
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
            self.whole = final  # until somebody resumes it
        finally:
            self._reading.release()

    def window(self, wanted: Wanted, first: int, most: int) -> tuple[list[Line], int]:
        """Return lines from the `first` of those that are wanted on (from the end where it is negative), and how many are
        wanted in all."""
        self.used = time.monotonic()
        numbers: Sequence[int] = range(self.count) if wanted.everything else self._look(wanted).lines
        total = len(numbers)
        begin = max(0, total + first) if first < 0 else min(first, max(0, total - 1))
        with self._writing:
            return [self._line(number) for number in numbers[begin : min(begin + most, total)]], total

    def close(self) -> None:
        with self._reading, self._writing:
            self.whole = True
            self._file.close()

    def _write(self, lines: Sequence[LogLine]) -> None:
        if not lines:
            return
        with self._writing:
            end, pieces = self._ends[-1], []
            attempts, nodes, ranks = self._who
            for at, node, rank, _, words, cursor in lines:
                self._cursor = cursor
                if words.startswith(MARK) and parse(words):
                    continue  # an event: the timeline and the curves tell it
                piece = f"{at[11:19]} {words[:LONGEST]}\n".encode("utf-8", "replace")
                pieces.append(piece)
                end += len(piece)
                self._ends.append(end)
                attempts.append(int(cursor.partition("/")[0]))
                nodes.append(node)
                ranks.append(rank)
                self.people.add((node, rank))
            self._file.seek(0, 2)
            self._file.write(b"".join(pieces))
            self._file.flush()

    def _line(self, number: int) -> Line:
        begin, end = self._ends[number], self._ends[number + 1]
        self._file.seek(begin)
        at, _, words = self._file.read(end - begin - 1).decode("utf-8", "replace").partition(" ")
        attempt, node, rank = (column[number] for column in self._who)
        return Line(number, at, attempt, node, rank, words)

    def _look(self, wanted: Wanted) -> Found:
        """Return what was found of the lines that are wanted, after looking at what was read since the last look."""
        with self._writing:
            found = self._found.setdefault(wanted, Found())
            self._found.move_to_end(wanted)
            while len(self._found) > 8:
                self._found.popitem(last=False)
            begin, end = found.looked, self.count
            numbers: Iterator[int] = iter(range(begin, end))
            if wanted.words and end > begin:
                numbers = self._matching(wanted.words, begin, end)
            _, nodes, ranks = self._who
            if wanted.node is not None:
                numbers = (n for n in numbers if nodes[n] == wanted.node)
            if wanted.rank is not None:
                numbers = (n for n in numbers if ranks[n] == wanted.rank)
            found.lines.extend(numbers)
            found.looked = end
        return found

    def _matching(self, words: str, begin: int, end: int) -> Iterator[int]:
        """Yield the numbers of lines with some words in them (any case of A to Z): the file is searched in large pieces."""
        wanted = words.encode("utf-8", "replace").lower()
        with mmap(self._file.fileno(), 0, access=ACCESS_READ) as view:
            while begin < end:
                after = max(begin + 1, bisect_right(self._ends, self._ends[begin] + PIECE, begin, end + 1) - 1)
                base = self._ends[begin]
                piece = view[base : self._ends[after]].lower()
                at = piece.find(wanted)
                while at >= 0:
                    number = bisect_right(self._ends, base + at, begin, after) - 1
                    yield number
                    at = piece.find(wanted, self._ends[number + 1] - base)
                begin = after


_books: OrderedDict[str, Logbook] = OrderedDict()


def book(run_id: str) -> Logbook:
    """Return the book of a run, which its pages share; those that were not looked at for longest are given up."""
    found = _books.get(run_id)
    if found is None:
        found = _books[run_id] = Logbook(run_id)
        while len(_books) > KEPT:
            oldest = min(_books.values(), key=lambda other: other.used if other is not found else found.used + 1)
            del _books[oldest.run_id]  # its file is gone with it
    return found
