"""The logs of several nodes as one: by time, in order on each node, from a cursor on."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine

CHUNK = 1 << 20  # bytes read of a log at a time
TAIL_S = 0.03  # how often a followed log is looked at
ASK_S = 0.15  # how often at least it is asked whether more can come
_Raw = tuple[str, int, int, int, str, int]  # at, node, rank, seq, text, offset behind the line
# What is behind an offset on every node, in pieces; None where nothing is, or nobody knows.
Look = Callable[[Sequence[int]], Sequence[Iterable[bytes] | None]]


def tail(
    logs: Sequence[Path], *, after: str | None = None, follow: bool = False, ended: Callable[[], bool] = lambda: True
) -> Iterator[LogLine]:
    """Yield the lines of several nodes' logs on this machine, as `merged` does."""

    def look(offsets: Sequence[int]) -> list[Iterable[bytes] | None]:
        sizes = [_size(log) for log in logs]
        return [
            _pieces(log, offset, size) if size > offset else None
            for log, offset, size in zip(logs, offsets, sizes, strict=True)
        ]

    return merged(look, len(logs), after=after, follow=follow, ended=ended)


def merged(
    look: Look,
    nodes: int,
    *,
    after: str | None = None,
    follow: bool = False,
    ended: Callable[[], bool] = lambda: True,
    pause_s: float | None = None,
) -> Iterator[LogLine]:
    """Yield the lines of several nodes' logs behind a cursor, by time, in order on each node.

    With `follow` it goes on until `ended()` says that nothing more will be written. The cursor is the byte offset on
    every node, joined by commas.
    """
    try:
        offsets = [int(part) for part in after.split(",")] if after else []
    except ValueError:
        raise BadRequest(f"{after!r} is no cursor of a log", "cloudtrain logs --json shows them") from None
    offsets += [0] * (nodes - len(offsets))
    words = [str(offset) for offset in offsets]  # kept, since most of a cursor stays as it was
    quiet = 0  # looks in which nothing was new: they come less often, down to a fifth, and cost a fifth
    began, ask_at = time.monotonic(), 0.0
    while True:
        last = not follow
        if follow and (moment := time.monotonic()) >= ask_at:
            last = ended()  # asked before reading: what was written until then is read below
            ask_at = moment + min((moment - began) / 50, ASK_S)  # asking costs more than looking
        seen = False
        streams = [
            _lines(pieces, node, offsets[node]) for node, pieces in enumerate(look(offsets)) if pieces is not None
        ]
        for at, node, rank, seq, text, offset in (
            streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))
        ):
            offsets[node] = offset
            words[node] = str(offset)
            seen = True
            yield LogLine(at, node, rank, seq, text, ",".join(words))
        if last:
            return
        quiet = 0 if seen else quiet + 1
        if not seen:
            time.sleep(TAIL_S * min(1 + quiet // 10, 5) if pause_s is None else pause_s)


def _pieces(log: Path, offset: int, size: int) -> Iterator[bytes]:
    """Yield a file's bytes between an offset and what was its size."""
    with log.open("rb") as file:
        file.seek(offset)
        while offset < size and (piece := file.read(min(CHUNK, size - offset))):
            offset += len(piece)
            yield piece


def _lines(pieces: Iterable[bytes], node: int, offset: int) -> Iterator[_Raw]:
    """Yield whole lines behind an offset; a line that is still being written waits for the next look."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n") if rest else piece.split(b"\n")
        for line in lines:
            offset += len(line) + 1
            parts = line.decode("utf-8", "backslashreplace").split(" ", 3)
            try:
                yield parts[2], node, int(parts[1]), int(parts[0]), parts[3], offset
            except (IndexError, ValueError):
                continue  # not one of ours: a supervisor that was killed in the middle of a line, then a full disk


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
