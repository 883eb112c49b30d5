"""Read a run from its output folder: attempts, states, logs and provenance, as entrypoints/launcher/output/history.py wrote them.

Whoever can write there can have written anything, so that nothing is believed: names and sizes are bounded here, and
records.py checks what the files hold. `cloudtrain resume` gives its job and source to a platform, and nothing else does.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from cloudtrain.backends.attached.files import OutputFiles, opened
from cloudtrain.backends.checkpoints import HISTORIES, name_here
from cloudtrain.backends.plan import AttachedAttempt
from cloudtrain.backends.records import MOST_TEXT, build_attempt, parse_record
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine

MOST_RECORD = 4 << 20  # bytes of a run.json
MOST_PIECE = 20 << 20  # bytes of a piece of a log
MOST_SOURCE = 512 << 20  # bytes of a packed source
MOST_LOG = 4 << 30  # bytes of an attempt's logs together; what is behind is left out
STARTS = 1_000_000_000  # numbers of the lines of one start of a node (backends/vertex/logs.py counts alike)
_START = r"\d{8}T\d{6}\.\d{6}Z-[0-9A-Za-z-]{1,64}"
_RECORD = re.compile(rf"([a-z][a-z0-9-]{{0,80}})-a([1-9]\d{{0,3}})/({_START})/run\.json")
_PIECE = re.compile(rf"node-(0|[1-9]\d{{0,4}})/({_START})/(\d{{8}})")
_LINE = re.compile(r"(\d{1,15}) (-1|\d{1,7}) (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z) (.*)", re.DOTALL)


@dataclass
class _Stream:
    """The pieces of one start of a node's log."""

    start: str
    sizes: dict[int, int] = field(default_factory=dict)


class AttachedRun:
    """The history of one run at a URI. Every call blocks; raises BackendError, BadRequest."""

    def __init__(self, uri: str) -> None:
        self.files: OutputFiles = opened(uri.removesuffix("/run.json"))
        self.uri = self.files.uri
        self._bases: dict[str, str] = {}  # attempt id -> one of HISTORIES; another one than "" is SageMaker's

    def attempts(self) -> list[AttachedAttempt]:
        """Return the run's attempts, the oldest first; raises BadRequest where there is no history."""
        newest: dict[int, tuple[str, str, str]] = {}
        first: dict[int, str] = {}
        run_ids = set()
        for base in HISTORIES:  # a run that moved has more than one
            if newest and base == HISTORIES[-1]:
                break
            for name in self.files.sizes(f"{base}history"):
                if match := _RECORD.fullmatch(name):
                    run_ids.add(match[1])
                    number = int(match[2])
                    newest[number] = max(newest.get(number, ("", "", "")), (match[3], name, base))
                    first[number] = min(first.get(number, match[3]), match[3])
        if not newest:
            hint = (
                "name the run's own folder, <output>/<run id>; a run has a history there where its job names an output"
            )
            raise BadRequest(f"there is no history of a run at {self.uri}", hint)
        if len(run_ids) > 1:
            raise BadRequest(f"{self.uri} holds the history of more than one run: {', '.join(sorted(run_ids)[:3])}")
        (run_id,) = run_ids
        attempts = []
        for number in sorted(newest):
            _, name, base = newest[number]
            self._bases[f"{run_id}-a{number}"] = base
            data = self.files.read(f"{base}history/{name}", MOST_RECORD)
            record = parse_record(data, run_id, number)
            if record is not None:
                superseded = number < max(newest)
                attempts.append(build_attempt(record, run_id, number, first[number], self.uri, superseded))
        if not attempts:
            raise BadRequest(f"what lies at {self.uri} is no history of a run that this cloudtrain can read")
        return attempts

    def lines(self, attempt_id: str, after: str | None = None) -> Iterator[LogLine]:
        """Yield the lines of all nodes behind a cursor, by time, in order on each node."""
        nodes = self._streams(attempt_id)
        cursors = _places(after)
        cursor_texts = {node: f"{node}/{start}@{offset}" for node, (start, offset) in cursors.items()}
        node_lines = [
            self._node(attempt_id, node, streams, cursors.get(node)) for node, streams in sorted(nodes.items())
        ]
        for at, node, rank, seq, text, start, offset in heapq.merge(*node_lines, key=itemgetter(0)):
            cursor_texts[node] = f"{node}/{start}@{offset}"
            yield LogLine(at, node, rank, seq, text, ",".join(cursor_texts.values()))

    def output_sizes(self) -> dict[str, int]:
        """Return name -> bytes of the files in the run's outputs."""
        return self.files.sizes("outputs")

    def read_output(self, name: str, most: int) -> bytes | None:
        """Return a file of the run's outputs, None where it is gone; raises BackendError where it has more bytes."""
        return self.files.read(f"outputs/{name}", most)

    def source(self, digest: str) -> bytes | None:
        """Return the packed source of that digest, None where there is none."""
        name = f"source/{digest}.tar.gz"
        found = (self.files.read(base + name, MOST_SOURCE) for base in HISTORIES)
        return next((data for data in found if data is not None), None) if digest.isalnum() else None

    def bring(self, attempt_id: str, into: Path, what: tuple[str, ...]) -> None:
        """Copy the run's folders below a folder."""
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            moved = name == "checkpoints" and any(self._bases.values())
            self.files.bring(name, into / name, name_here if moved else str)
        archived = self._bases.get(attempt_id) and self.uri.startswith("s3://")
        if archived:  # by SageMaker itself (backends/sagemaker/request.py)
            from cloudtrain.backends import s3

            aws = self.files.aws  # type: ignore[attr-defined]
            for name, archive in (("model", "model.tar.gz"), ("outputs", "output.tar.gz")):
                if name in what:
                    s3.download_archive(aws, f"{self.uri}/{attempt_id}/output/{archive}", into / name)

    def _streams(self, attempt_id: str) -> dict[int, list[_Stream]]:
        """Return the starts of every node, each with its pieces, up to MOST_LOG bytes."""
        streams: dict[tuple[int, str], _Stream] = {}
        whole = 0
        for name, size in sorted(self.files.sizes(f"{self._bases.get(attempt_id, '')}logs/{attempt_id}").items()):
            piece = _PIECE.fullmatch(name)
            whole += size
            if piece and size <= MOST_PIECE and whole <= MOST_LOG:
                stream = streams.setdefault((int(piece[1]), piece[2]), _Stream(piece[2]))
                stream.sizes[int(piece[3])] = size
        nodes: dict[int, list[_Stream]] = {}
        for (node, _), stream in sorted(streams.items()):
            nodes.setdefault(node, []).append(stream)
        return nodes

    def _node(
        self, attempt_id: str, node: int, streams: list[_Stream], cursor: tuple[str, int] | None
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
                if at + size > offset:
                    name = f"{self._bases.get(attempt_id, '')}logs/{attempt_id}/node-{node}/{stream.start}/{number:08d}"
                    data = (self.files.read(name, MOST_PIECE) or b"")[max(0, offset - at) :]
                    begin = max(at, offset) - len(rest)
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        begin += len(line) + 1
                        match = _LINE.fullmatch(line.decode("utf-8", "backslashreplace")[: 2 * MOST_TEXT])
                        if match:
                            seq = index * STARTS + int(match[1]) % STARTS
                            yield match[3], node, int(match[2]), seq, match[4], stream.start, begin
                at, number = at + size, number + 1


def _places(after: str | None) -> dict[int, tuple[str, int]]:
    """Return node -> (start, offset) of a cursor; raises BadRequest."""
    offsets = {}
    for part in after.split(",") if after else ():
        match = re.fullmatch(rf"(\d{{1,5}})/({_START})@(\d{{1,15}})", part)
        if match is None:
            raise BadRequest(f"{after!r} is no cursor of a log", "cloudtrain logs --json shows them")
        offsets[int(match[1])] = (match[2], int(match[3]))
    return offsets
