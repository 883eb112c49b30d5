"""The copy of a platform's log in the home: a watcher writes each line once, and every reader reads it there.

`runs/<run>/log/<attempt>.jsonl` has one row for a line: `[at, node, rank, seq, text, cursor]`. The cursor is written in
full in the first row of a batch. In the other rows it is an object with the parts that have changed, since a cursor has
one part for each node, joined by commas.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError
from cloudtrain.events import LogLine
from cloudtrain.history.records import AttemptRecord

CHUNK_BYTES = 1 << 20  # read at once
SEARCH_BYTES = 1 << 18  # searched at once, from the end of the file
FOLLOWED_S = 10.0  # a log is followed when a reader has said so within this time
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class SpoolTaken(BackendError):
    """Another process has written to the spool: it watches the run now."""


class Spool:
    """The spool of one attempt. Only the process that holds the run's lease may write."""

    def __init__(self, home: Path, run_id: str, number: int, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.path = home / "runs" / run_id / "log" / f"{number}.jsonl"
        self._followed = self.path.with_name("followed")
        self._end = 0  # bytes that were there when this object last wrote
        self.cursor: str | None = None  # of the last line; known after `open`

    # -- write ----------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, home: Path, attempt: AttemptRecord, backend: Backend, clock: Clock = SYSTEM) -> Spool | None:
        """Return an attempt's spool for writing; None where its log is on this machine, or was not spooled from its start.

        What a killed writer has left of a last line is cut off.
        """
        spool = cls(home, attempt.run_id, attempt.number, clock)
        if not backend.follow_s:
            return None
        try:
            if attempt.cursor is not None and not spool.exists():
                return None
            spool.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(spool.path, os.O_CREAT | os.O_WRONLY, 0o600))
            spool._find_end()
        except OSError:
            return None
        if attempt.cursor is not None and spool.cursor is None:  # its lines were lost with the machine's power
            spool.remove()
            return None
        return spool

    def append(self, lines: Sequence[LogLine]) -> None:
        """Write lines behind those that are there; raises SpoolTaken, and OSError where they cannot be written."""
        rows: list[str] = []
        parts: list[str] = []
        for line in lines:
            before, parts = parts, line.cursor.split(",")
            change: object = line.cursor
            if len(parts) == len(before) > 1:
                change = {str(at): new for at, (old, new) in enumerate(zip(before, parts, strict=True)) if old != new}
            rows.append(_encode([*line[:5], change]))
        data = ("\n".join(rows) + "\n").encode("utf-8", "surrogatepass")
        with self.path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) != self._end:
                raise SpoolTaken(f"another process writes to {self.path}")
            written = 0
            while written < len(data):
                written += file.write(data[written:])
        self._end += len(data)
        self.cursor = lines[-1].cursor

    def touch(self) -> None:
        """Note that the log was read just now."""
        with suppress(OSError):
            os.utime(self.path, (self._clock.now(), self._clock.now()))

    def remove(self) -> None:
        """Remove the spool: readers ask the platform then."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _find_end(self) -> None:
        self._end, self.cursor = 0, None
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            for begin, data in _pieces_from_end(file.fileno(), size):
                for line, behind in _decode(data, begin):
                    self._end, self.cursor = behind, line.cursor
                if self.cursor is not None:
                    break
            if self._end < size:
                file.truncate(self._end)

    # -- read -----------------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether a watcher spools this attempt's log."""
        return self.path.exists()

    def read_at(self) -> float:
        """Return when the log was read last, in seconds since 1970; 0 where it was not."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def lines(self, after: str | None = None) -> Iterator[LogLine]:
        """Yield the lines after a cursor, all for None; nothing where the spool has no line with that cursor."""
        reader = self.reader(after)
        return reader.read() if reader else iter(())

    def reader(self, after: str | None = None) -> Reader | None:
        """Return a reader of the lines after a cursor; None where the spool has no line with that cursor."""
        if after is None:
            return Reader(self.path, 0, "") if self.exists() else None
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            for begin, data in _pieces_from_end(file.fileno(), file.seek(0, os.SEEK_END)):
                for line, behind in _decode(data, begin):
                    if line.cursor == after:
                        return Reader(self.path, behind, after)
        return None

    # -- who follows ----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Tell the run's watcher that somebody follows the log: for FOLLOWED_S it reads the log more often."""
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._followed.touch(mode=0o600)
            os.utime(self._followed, (self._clock.now(), self._clock.now()))

    def is_followed(self) -> bool:
        """Return whether somebody follows the log."""
        try:
            return abs(self._clock.now() - self._followed.stat().st_mtime) < FOLLOWED_S
        except OSError:
            return False


class Reader:
    """Reads a spool on from a line."""

    def __init__(self, path: Path, offset: int, cursor: str) -> None:
        self._path, self._offset, self._cursor = path, offset, cursor

    def read(self) -> Iterator[LogLine]:
        """Yield the whole lines that were written since the last call; raises FileNotFoundError where the spool is gone."""
        if self._path.stat().st_size <= self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while piece := file.read(CHUNK_BYTES):
                whole, newline, rest = (rest + piece).rpartition(b"\n")
                for line, behind in _decode(whole + newline, self._offset, self._cursor):
                    self._offset, self._cursor = behind, line.cursor
                    yield line


def _decode(data: bytes, offset: int, cursor: str = "") -> Iterator[tuple[LogLine, int]]:
    """Yield the lines of whole rows, each with the offset behind it; ends at a row that was not written whole.

    `cursor` is that of the line before.
    """
    parts = cursor.split(",")
    begin = 0
    while (end := data.find(b"\n", begin)) >= 0:
        try:
            at, node, rank, seq, text, change = json.loads(data[begin:end].decode("utf-8", "surrogatepass"))
            if isinstance(change, str):
                cursor = change
                parts = cursor.split(",")
            else:
                for index, part in change.items():
                    parts[int(index)] = part
                cursor = ",".join(parts)
        except (ValueError, AttributeError, IndexError):
            return
        begin = end + 1
        yield LogLine(at, node, rank, seq, text, cursor), offset + begin


def _pieces_from_end(file: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of a spool, the last one first, each as its offset and rows that begin with a cursor in full."""
    while end > 0:
        size = SEARCH_BYTES
        begin, data = _piece(file, end, size)
        while begin is None:
            size *= 4
            begin, data = _piece(file, end, size)
        yield begin, data
        end = begin


def _piece(file: int, end: int, size: int) -> tuple[int | None, bytes]:
    first = max(0, end - size)
    data = os.pread(file, end - first, first)
    if first == 0:
        return 0, data
    at = data.find(b"\n") + 1
    while at and not data[at : data.find(b"\n", at)].endswith(b'"]'):
        at = data.find(b"\n", at) + 1
    return (first + at, data[at:]) if at else (None, b"")
