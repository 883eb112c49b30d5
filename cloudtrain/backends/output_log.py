"""Read the log that a run's launchers have uploaded to its output, in numbered pieces of every start of every node.

entrypoints/launcher/output/history.py wrote them. Whoever can write there can have written anything: sizes are bounded.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from cloudtrain.backends.records import MOST_TEXT
from cloudtrain.backends.store.files import Files, NotRead, report
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine

MOST_PIECE = 20 << 20  # bytes of a piece of a log
MOST_LOG = 4 << 30  # bytes of an attempt's logs together; what is behind is left out
STARTS = 1_000_000_000  # numbers of the lines of one start of a node (Vertex AI's log is counted alike)
START = r"\d{8}T\d{6}\.\d{6}Z-[0-9A-Za-z-]{1,64}"
_PIECE = re.compile(rf"node-(0|[1-9]\d{{0,4}})/({START})/(\d{{8}})")
_LINE = re.compile(r"(\d{1,15}) (-1|\d{1,7}) (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z) (.*)", re.DOTALL)


@dataclass
class _Stream:
    """The pieces of one start of a node's log."""

    start: str
    sizes: dict[int, int] = field(default_factory=dict)


def log_lines(files: Files, folder: str, after: str | None = None) -> Iterator[LogLine]:
    """Yield the lines of all nodes behind a cursor, by time, in order on each node; blocking.

    Args:
        folder: where the attempt's log lies in the run's output: `logs/<attempt id>`.

    Raises:
        BadRequest: `after` is no cursor.
        BackendError: the output cannot be read.
    """
    cursors = _places(after)
    try:
        nodes = _streams(files, folder)
    except NotRead as refused:
        report(refused)
        return
    cursor_texts = {node: f"{node}/{start}@{offset}" for node, (start, offset) in cursors.items()}
    node_lines = [_node(files, folder, node, streams, cursors.get(node)) for node, streams in sorted(nodes.items())]
    for at, node, rank, seq, text, start, offset in heapq.merge(*node_lines, key=itemgetter(0)):
        cursor_texts[node] = f"{node}/{start}@{offset}"
        yield LogLine(at, node, rank, seq, text, ",".join(cursor_texts.values()))


def _streams(files: Files, folder: str) -> dict[int, list[_Stream]]:
    """Return the starts of every node, each with its pieces, up to MOST_LOG bytes."""
    streams: dict[tuple[int, str], _Stream] = {}
    whole = 0
    for name, size in sorted(files.sizes(folder).items()):
        piece = _PIECE.fullmatch(name)
        whole += min(max(size, 0), MOST_PIECE)
        if piece and whole <= MOST_LOG:
            stream = streams.setdefault((int(piece[1]), piece[2]), _Stream(piece[2]))
            stream.sizes[int(piece[3])] = size
    nodes: dict[int, list[_Stream]] = {}
    for (node, _), stream in sorted(streams.items()):
        nodes.setdefault(node, []).append(stream)
    return nodes


def _node(
    files: Files, folder: str, node: int, streams: list[_Stream], cursor: tuple[str, int] | None
) -> Iterator[tuple[str, int, int, int, str, str, int]]:
    """Yield the lines of one node behind a place, with the place behind each."""
    for index, stream in enumerate(streams):
        if cursor and stream.start < cursor[0]:
            continue
        offset = cursor[1] if cursor and stream.start == cursor[0] else 0
        at = number = 0
        rest = b""
        while number in stream.sizes:  # a gap: what is behind it comes when it has been filled
            size = stream.sizes[number]
            if size < 0 or at + size > offset:
                name = f"{folder}/node-{node}/{stream.start}/{number:08d}"
                try:
                    data = (files.read(name, MOST_PIECE) or b"")[max(0, offset - at) :]
                except NotRead as refused:
                    report(refused)
                    break
                begin = max(at, offset) - len(rest)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    begin += len(line) + 1
                    match = _LINE.fullmatch(line.decode("utf-8", "backslashreplace")[: 2 * MOST_TEXT])
                    if match:
                        seq = index * STARTS + int(match[1]) % STARTS
                        yield match[3], node, int(match[2]), seq, match[4], stream.start, begin
                if len(rest) > MOST_PIECE:
                    report(NotRead(f"{files.uri}/{name} has a line of more than {MOST_PIECE:,} bytes"))
                    break
            at, number = at + size, number + 1


def _places(after: str | None) -> dict[int, tuple[str, int]]:
    """Return node -> (start, offset) of a cursor; raises BadRequest."""
    offsets = {}
    for part in after.split(",") if after else ():
        match = re.fullmatch(rf"(\d{{1,5}})/({START})@(\d{{1,15}})", part)
        if match is None:
            raise BadRequest(f"{after!r} is not a log cursor", "cloudtrain logs --json prints the cursor of each line")
        offsets[int(match[1])] = (match[2], int(match[3]))
    return offsets
