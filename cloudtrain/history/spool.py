"""What a watcher leaves in the home for readers: the copy of a platform's log, and when the platform was last asked.

`runs/<run>/log/<attempt>.jsonl` has one row for a line: `[at, node, rank, seq, text, cursor]`. The cursor is written in
full in the first row of a batch. In the other rows it is an object with the parts that have changed, since a cursor has
one part for each node, joined by commas. `runs/<run>/asked` was modified when the platform was last asked, and has the
error where there was no answer.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends.api import Backend
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, Unreachable
from cloudtrain.events import LogLine
from cloudtrain.history.records import AttemptRecord
from cloudtrain.job.units import format_time, unix_time

CHUNK_BYTES = 1 << 20  # read at once
SEARCH_BYTES = 1 << 18  # searched at once, from the end of the file
FOLLOWED_S = 10.0  # a log is followed when a reader has said so within this time
FRESH_S = 5.0  # an answer of this age is not asked for again
OLD_AFTER_S, OLD_FRESH_S = 600.0, 30.0  # the same for a run that is older
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


@dataclass(frozen=True)
class Asked:
    """The last question for a run's status: when, and the error where there was no answer."""

    at: float  # seconds since 1970
    shared: bool = False  # the platform should be asked rarely
    error: str = ""
    since: str = ""  # of the first question without an answer, UTC
    unreachable: bool = False
    clock: Clock = SYSTEM

    @property
    def age_s(self) -> float:
        return max(0.0, self.clock.now() - self.at)

    def is_fresh(self, attempt: AttemptRecord) -> bool:
        """Return whether a reader takes the stored answer instead of asking for the run's newest attempt again."""
        began = unix_time(attempt.created_at)
        return (
            self.shared
            and began < self.at
            and abs(self.clock.now() - self.at) < fresh_s(attempt.created_at, self.clock)
        )

    @property
    def outage(self) -> str:
        """Since when there is no answer, and why; "" where it answered."""
        return (
            f"{'no answer' if self.unreachable else 'an error'} since {self.since} ({self.error})" if self.error else ""
        )

    def describe(self) -> str:
        """Return when it was asked and since when there is no answer; "" where it answered."""
        when = f"last asked {self.age_s:.0f} s ago: " if self.at else ""  # `expire` forgets when
        return when + self.outage if self.error else ""


def fresh_s(created_at: str, clock: Clock = SYSTEM) -> float:
    """Return for how long readers take a stored answer about what was made at a time."""
    return OLD_FRESH_S if clock.now() - unix_time(created_at) > OLD_AFTER_S else FRESH_S


def note_contact(
    home: Path, run_id: str, backend: Backend, error: CloudtrainError | None = None, clock: Clock = SYSTEM
) -> None:
    """Note that a run's platform was asked just now, and its error where it gave no answer."""
    shared = backend.follow_s is not None
    before = last_contact(home, run_id)
    if error is None and not shared and (before is None or not before.error):
        return
    path = _path(home, run_id)
    with suppress(OSError):
        if error is None:
            if before and before.shared and not before.error:
                os.utime(path, (clock.now(), clock.now()))
            else:
                _write(path, {"shared": shared}, clock)
            return
        since = before.since if before and before.error else f"{format_time(clock.now())[:19]}Z"
        data = {"error": error.message, "since": since, "unreachable": isinstance(error, Unreachable)}
        _write(path, {"shared": shared, **data}, clock)


def last_contact(home: Path, run_id: str, clock: Clock = SYSTEM) -> Asked | None:
    """Return when a run's platform was last asked; None where that is not known."""
    path = _path(home, run_id)
    try:
        return Asked(path.stat().st_mtime, clock=clock, **json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def expire_contact(home: Path, run_id: str) -> None:
    """Let the next reader ask at once: something has happened that changes the status."""
    with suppress(OSError):
        os.utime(_path(home, run_id), (0, 0))


def _path(home: Path, run_id: str) -> Path:
    return Path(f"{home}/runs/{run_id}/asked")  # `/` would take longer than to ask for its time


def _write(path: Path, data: dict[str, object], clock: Clock) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"asked.{os.getpid()}.new")
    new.write_text(json.dumps(data), "utf-8")
    os.utime(new, (clock.now(), clock.now()))
    new.replace(path)
