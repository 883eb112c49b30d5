r"""The log of a node: numbered, timed lines of all ranks and of the launcher itself.

<seq> <rank> <at> <text>\n      rank -1 is the launcher; at is UTC, ISO 8601
"""

from __future__ import annotations

import json
import os
import threading

from .clock import SYSTEM, Clock
from .masks import Masks
from .sink import Sink
from .status import now

MAX_LINE = 64 * 1024  # bytes of text; a longer line is cut into pieces
MARK = "::cloudtrain::"
CHUNK = 1 << 20
LAUNCHER = -1


class Log:
    """Appends lines to a descriptor, in whole lines; safe to use from several threads."""

    def __init__(self, descriptor: int, seq: int = 0, reserve: int | None = None, clock: Clock = SYSTEM) -> None:
        self.clock = clock  # also of those who write here
        self._sinks = [Sink(descriptor, reserve, clock)]
        self._seq = seq
        self._closed = False
        self.copy: tuple[int, int] | None = None  # a descriptor to read all of it from, and where its own lines begin
        self.printed_at = self.clock.monotonic()  # when a rank last printed a line
        self._lock = threading.Lock()
        self.masks = Masks()

    @classmethod
    def in_folder(cls, folder: str, clock: Clock = SYSTEM) -> Log:
        """Open <folder>/log for appending and continue its numbers; raises OSError."""
        descriptor = os.open(os.path.join(folder, "log"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, 2 * MAX_LINE, max(0, size - 2 * MAX_LINE)) if size else b""
        log = cls(descriptor, reserve=_unnamed_file(folder), clock=clock)
        log.copy = (descriptor, size)
        if tail and not tail.endswith(b"\n"):
            log._sinks[0].write(b"\n")  # whoever wrote before was killed in the middle of a line
        for line in reversed(tail.split(b"\n")):
            number = line.split(b" ", 1)[0]
            if number.isdigit():
                log._seq = int(number) + 1
                break
        return log

    def lines(self, rank: int, lines: list[bytes]) -> None:
        """Append lines (without their ends) of one rank; they share one time."""
        if not lines or self._closed:
            return
        if rank != LAUNCHER:
            self.printed_at = self.clock.monotonic()
        with self._lock:
            at = now(self.clock)
            head = f" {rank} {at} ".encode()
            first = self._seq
            self._seq += len(lines)
            data = b"".join([b"%d%b%b\n" % (seq, head, line) for seq, line in enumerate(lines, first)])
            for sink in self._sinks:
                sink.put(first, at, data, rank == LAUNCHER)

    def say(self, text: str) -> None:
        """Append lines of the launcher's own. Only the first may be an event: a file's name may hold what looks like one."""
        raw = self.masks.apply(text.encode("utf-8", "backslashreplace")).replace(
            b"\n" + MARK.encode(), b"\n " + MARK.encode()
        )
        self.lines(LAUNCHER, [piece for line in raw.split(b"\n") for piece in cut(line)])

    def event(self, kind: str, **data: object) -> None:
        """Append an event of the launcher's own."""
        self.say(MARK + json.dumps({"kind": kind, **data}, separators=(",", ":"), ensure_ascii=False))

    def warn(self, line: str) -> None:
        """Say a line, and send it as an alarm."""
        self.say(line)
        self.event("alarm", reason=line)

    def settle(self) -> int:
        """Write what a full disk has refused, and return how many lines are lost; the ranks have ended."""
        with self._lock:
            lost = [sink.settle() for sink in self._sinks]
        return lost[0]  # those of the copy are not lost where the log is read

    def close(self) -> None:
        """Accept nothing more: the last line stays the last."""
        self._closed = True
        with self._lock:
            for sink in self._sinks:
                sink.close()

    def forget(self) -> None:
        """Keep no copy where none is needed (KeptLog has one)."""

    def flush(self) -> None:
        """Try again to write what a full disk has refused."""
        with self._lock:
            for sink in self._sinks:
                sink.flush()


class KeptLog(Log):
    """Appends to a descriptor and to a copy; on a disk that takes no copy there is none."""

    def __init__(self, descriptor: int, clock: Clock = SYSTEM) -> None:
        super().__init__(descriptor, clock=clock)
        import tempfile

        self._copy = _unnamed_file(tempfile.gettempdir())
        if self._copy is not None:
            self._sinks.append(Sink(self._copy, _unnamed_file(tempfile.gettempdir()), clock))
            self.copy = (self._copy, 0)

    def forget(self) -> None:
        with self._lock:  # another thread may be writing a line to it
            if self._copy is not None:
                self.copy = None
                del self._sinks[1:]
                os.close(self._copy)
                self._copy = None


class PlainLog(Log):
    """Appends what a rank prints, without numbers: beside launchers of other ranks, the first of which numbers its lines."""

    def lines(self, rank: int, lines: list[bytes]) -> None:
        shown = [line + b"\n" for line in lines if rank != LAUNCHER or not line.startswith(MARK.encode())]
        with self._lock:
            self._sinks[0].put(0, now(self.clock), b"".join(shown), rank == LAUNCHER)


def _unnamed_file(folder: str) -> int | None:
    """Return a new file in a folder that has no name there, None where there can be none."""
    path = os.path.join(folder, f".log-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
    except OSError:
        return None
    return descriptor


class Splitter:
    r"""Cuts the output of one rank into lines, whatever the reads look like.

    \n, \r\n and a lone \r end a line; a line over 64 KiB comes in pieces; secrets are masked before anything is cut;
    bytes that are no UTF-8 become backslash escapes.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._rest = b""
        self._after_return = False  # the last read ended in \r: a \n that follows belongs to it

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now."""
        if self._after_return and data:
            self._after_return = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._after_return = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n") + 1
        whole, self._rest = data[:end], data[end:]
        lines = self._lines(whole[:-1]) if end else []
        if len(self._rest) > MAX_LINE:
            # What may be the beginning of a secret stays behind until it is known whether it is one.
            keep = max(3, self._log.masks.longest - 1)  # 3: a character's first bytes
            rest = self._log.masks.apply(self._rest)
            ready = (len(rest) - keep) // MAX_LINE * MAX_LINE
            if ready > 0:
                ready = _boundary(rest, ready)
                lines += self._lines(rest[:ready])
                self._rest = rest[ready:]
        return lines

    def end(self) -> list[bytes]:
        """Return the last line, which had no end."""
        rest, self._rest = self._rest, b""
        return self._lines(rest) if rest else []

    def _lines(self, data: bytes) -> list[bytes]:
        data = self._log.masks.apply(data)
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                data = data.decode("utf-8", "backslashreplace").encode()
        lines = data.split(b"\n")
        if len(data) > MAX_LINE and max(map(len, lines)) > MAX_LINE:
            return [piece for line in lines for piece in cut(line)]
        return lines


def cut(line: bytes) -> list[bytes]:
    """Return a line in pieces of at most 64 KiB, never within a character."""
    pieces = []
    while len(line) > MAX_LINE:
        at = _boundary(line, MAX_LINE)
        pieces.append(line[:at])
        line = line[at:]
    return [*pieces, line]


def _boundary(data: bytes, at: int) -> int:
    """Return the nearest position at or before `at` that is not within a UTF-8 character."""
    for back in range(4):
        if at - back > 0 and data[at - back] & 0xC0 != 0x80:
            return at - back
    return at
