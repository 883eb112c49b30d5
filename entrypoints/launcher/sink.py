"""Appends lines of a log to a descriptor. What a full disk refuses waits in memory; what is lost is said in the log.

A reserve on the same disk is freed at the end, so that the last lines and the launcher's own arrive on a full disk too.
"""

from __future__ import annotations

import errno
import os

from .clock import SYSTEM, Clock

MAX_WAITING = 16 << 20  # bytes kept in memory while the disk is full
RESERVE = 256 << 10  # bytes on the disk that are freed at the end
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class _Chunk:
    """Whole lines that wait: the number of the first one and its time; `lost` counts lines that are in none."""

    def __init__(self, seq: int, at: str, data: bytes, own: bool, lost: int = 0) -> None:
        self.seq, self.at, self.data, self.own, self.lost = seq, at, data, own, lost
        self.torn = False  # its first line was written in part

    def text(self) -> bytes:
        if not self.lost:
            return self.data
        return f"{self.seq} -1 {self.at} {incomplete(self.lost)}\n".encode()


class Sink:
    """One place of a log; not safe to use from several threads. With `reserve` it keeps an open file on that disk."""

    def __init__(self, descriptor: int, reserve: int | None = None, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.descriptor = descriptor
        self.lost = 0  # lines
        self._waiting: list[_Chunk] = []
        self._bytes = 0  # that wait
        self._reserve = reserve
        if reserve is not None:
            try:
                os.posix_fallocate(reserve, 0, RESERVE)
            except (OSError, AttributeError):
                pass  # it is full already, or another system

    def put(self, seq: int, at: str, data: bytes, own: bool) -> None:
        """Append numbered lines, the first of which has this number and time; `own` ones of the launcher are not lost."""
        if not self._waiting:
            rest = self.write(data)
            if not rest:
                return
            chunk = _rest(_Chunk(seq, at, data, own), data, rest)
        else:
            chunk = _Chunk(seq, at, data, own)
        self._waiting.append(chunk)
        self._bytes += len(chunk.data)
        if self._bytes > MAX_WAITING:
            self._shed(MAX_WAITING // 2)

    def flush(self) -> None:
        """Try again to write what a full disk has refused."""
        while self._waiting:
            chunk = self._waiting[0]
            text = chunk.text()
            rest = self.write(text)
            if rest:
                self._waiting[0] = _rest(chunk, text, rest)
                break
            del self._waiting[0]
        self._bytes = sum(len(chunk.data) for chunk in self._waiting)

    def settle(self) -> int:
        """Write what can be written, choose what the reserve will hold of the rest, and return how many lines are lost."""
        self.flush()
        if self._waiting:
            self._shed(RESERVE - (16 << 10))
        return self.lost

    def close(self) -> None:
        """Write what waits, into the space of the reserve where there is no other."""
        self.settle()
        if self._reserve is not None:
            os.close(self._reserve)  # it has no name: its space is free now
            self._reserve = None
        self.flush()

    def write(self, data: bytes) -> bytes:
        """Write as much as there is space for and return the rest."""
        while data:
            try:
                data = data[os.write(self.descriptor, data) :]
            except BlockingIOError:
                self._clock.sleep(0.001)
            except OSError as error:
                return data if error.errno in _FULL else b""  # no reader any more (EPIPE): training continues
        return b""

    def _shed(self, limit: int) -> None:
        """Keep the newest lines, half of the limit for the launcher's own and half for the others."""
        room = {True: limit // 2, False: limit // 2}
        kept: list[_Chunk] = []
        for chunk in reversed(self._waiting):
            text = (
                chunk.data if chunk.lost or len(chunk.data) <= room[chunk.own] else _tail(chunk.data, room[chunk.own])
            )
            room[chunk.own] = room[chunk.own] - len(text) if text == chunk.data else 0
            gone = chunk.data[: len(chunk.data) - len(text)]
            first = gone[: gone.find(b"\n") + 1] if chunk.torn else b""
            if text:
                kept.append(_rest(chunk, chunk.data, text))
            lost = chunk.lost + gone.count(b"\n") - bool(first)
            self.lost += lost - chunk.lost
            if lost and kept and kept[-1].lost and not first:
                kept[-1].lost, kept[-1].seq, kept[-1].at = kept[-1].lost + lost, chunk.seq, chunk.at
            elif lost:
                kept.append(_Chunk(chunk.seq + bool(first), chunk.at, b"", True, lost))
            if first:
                whole = _Chunk(chunk.seq, chunk.at, first, True)
                whole.torn = True
                kept.append(whole)
        self._waiting = kept[::-1]
        self._bytes = sum(len(chunk.data) for chunk in self._waiting)


def _rest(chunk: _Chunk, text: bytes, rest: bytes) -> _Chunk:
    """Return what is left of a chunk when the rest of its text still waits."""
    if len(rest) == len(text):
        return chunk
    written = text[: -len(rest)]
    left = _Chunk(chunk.seq + written.count(b"\n"), chunk.at, rest, chunk.own)
    left.torn = not written.endswith(b"\n")
    return left


def incomplete(lost: int) -> str:
    """Return the sentence that stands for lines that are lost."""
    return f"log incomplete: disk full, {lost} line{'s' * (lost != 1)} lost"


def _tail(data: bytes, most: int) -> bytes:
    """Return the last whole lines of at most so many bytes."""
    tail = data[-most:] if most > 0 else b""
    return tail[tail.find(b"\n") + 1 :]
