"""Merge and follow the logs of several nodes: by time, in order on each node, from a cursor on."""

from __future__ import annotations

import heapq
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine
from cloudtrain.source import untrusted

CHUNK_BYTES = 1 << 20  # bytes read of a log at a time
MOST_LINE = 8 << 20  # bytes; a longer line is left out
TAIL_S = 0.03  # pause between two reads of a followed log
ASK_S = 0.15  # longest pause between two checks whether the job has ended
_RawLine = tuple[str, int, int, int, str, int]  # at, node, rank, seq, text, offset behind the line
# Takes an offset for every node and returns the bytes after it in pieces; None if there are none or the node is unreachable.
ReadPieces = Callable[[Sequence[int]], Sequence[Iterable[bytes] | None]]


def tail(
    logs: Sequence[Path], *, after: str | None = None, follow: bool = False, ended: Callable[[], bool] = lambda: True
) -> Iterator[LogLine]:
    """Yield the lines of several log files on this machine, as `merge` does."""

    def read_pieces(offsets: Sequence[int]) -> list[Iterable[bytes] | None]:
        sizes = [_size(log) for log in logs]
        return [
            _pieces(log, offset, size) if size > offset else None
            for log, offset, size in zip(logs, offsets, sizes, strict=True)
        ]

    return merge(read_pieces, len(logs), after=after, follow=follow, ended=ended)


def merge(
    read_pieces: ReadPieces,
    nodes: int,
    *,
    after: str | None = None,
    follow: bool = False,
    ended: Callable[[], bool] = lambda: True,
    pause_s: float | None = None,
    clock: Clock = SYSTEM,
) -> Iterator[LogLine]:
    """Yield the log lines of several nodes after a cursor, by time, in order on each node.

    With `follow`, continues until `ended()` is true. The cursor is the byte offset on every node, joined by commas.
    """
    try:
        offsets = [int(part) for part in after.split(",")] if after else []
    except ValueError:
        raise BadRequest(
            f"{after!r} is not a log cursor", "cloudtrain logs --json prints the cursor of each line"
        ) from None
    offsets += [0] * (nodes - len(offsets))
    cursor_parts = [str(offset) for offset in offsets]  # kept, since most of a cursor stays as it was
    idle_looks = 0  # looks in which nothing was new: they come less often, down to a fifth, and cost a fifth
    started, next_check = clock.monotonic(), 0.0
    while True:
        final_pass = not follow
        if follow and (now := clock.monotonic()) >= next_check:
            final_pass = ended()  # asked before reading: what was written until then is read below
            next_check = now + min((now - started) / 50, ASK_S)  # asking costs more than looking
        new_lines = False
        streams = [
            _lines(pieces, node, offsets[node])
            for node, pieces in enumerate(read_pieces(offsets))
            if pieces is not None
        ]
        for at, node, rank, seq, text, offset in (
            streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))
        ):
            offsets[node] = offset
            cursor_parts[node] = str(offset)
            new_lines = True
            yield LogLine(at, node, rank, seq, text, ",".join(cursor_parts))
        if final_pass:
            return
        idle_looks = 0 if new_lines else idle_looks + 1
        if not new_lines:
            clock.sleep(TAIL_S * min(1 + idle_looks // 10, 5) if pause_s is None else pause_s)


def _pieces(log: Path, offset: int, size: int) -> Iterator[bytes]:
    """Yield a file's bytes from an offset to `size`."""
    try:
        descriptor = untrusted.open_file(log.parent, log.name)
    except OSError:
        return
    with open(descriptor, "rb") as file:
        file.seek(offset)
        while offset < size and (piece := file.read(min(CHUNK_BYTES, size - offset))):
            offset += len(piece)
            yield piece


def _lines(pieces: Iterable[bytes], node: int, offset: int) -> Iterator[_RawLine]:
    """Yield whole lines after an offset; a line that is still being written is left for the next read."""
    rest, dropped = b"", 0
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n") if rest else piece.split(b"\n")
        for line in lines:
            offset += dropped + len(line) + 1
            if dropped:
                dropped = 0
                continue
            parts = line.decode("utf-8", "backslashreplace").split(" ", 3)
            try:
                yield parts[2], node, int(parts[1]), int(parts[0]), parts[3], offset
            except (IndexError, ValueError):
                continue  # an incomplete line, from a killed supervisor or a full disk
        if len(rest) > MOST_LINE:  # the launcher writes no such line
            rest, dropped = b"", dropped + len(rest)


def _size(path: Path) -> int:
    try:
        about = path.lstat()
    except OSError:
        return 0
    return about.st_size if stat.S_ISREG(about.st_mode) else 0
