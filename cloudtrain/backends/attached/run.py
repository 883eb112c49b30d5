"""Read a run from its output folder: attempts, states, logs and provenance, as entrypoints/launcher/output/history.py wrote them.

Whoever can write there can have written anything, so that nothing is believed: every name, number and text is checked,
what does not fit is left out, sizes are bounded, and nothing of it is ever given to a platform.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from cloudtrain.backends.api import AttachedAttempt, Plan
from cloudtrain.backends.attached.files import OutputFiles, opened
from cloudtrain.errors import BackendError, BadRequest, CloudtrainError
from cloudtrain.events import LogLine, State, Status
from cloudtrain.job.units import format_time, now, seconds_since

VERSION = 1
MOST_RECORD = 4 << 20  # bytes of a run.json
MOST_PIECE = 20 << 20  # bytes of a piece of a log
MOST_LOG = 4 << 30  # bytes of an attempt's logs together; what is behind is left out
MOST_TEXT = 64 << 10  # characters of a text
SILENT_S = 3600.0  # without a word for so long it is taken for lost
STARTS = 1_000_000_000  # numbers of the lines of one start of a node (backends/vertex/logs.py counts alike)
_START = r"\d{8}T\d{6}\.\d{6}Z-[0-9A-Za-z-]{1,64}"
_RECORD = re.compile(rf"([a-z][a-z0-9-]{{0,80}})-a([1-9]\d{{0,3}})/({_START})/run\.json")
_PIECE = re.compile(rf"node-(0|[1-9]\d{{0,4}})/({_START})/(\d{{8}})")
_LINE = re.compile(r"(\d{1,15}) (-1|\d{1,7}) (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z) (.*)", re.DOTALL)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")
_WORD = re.compile(r"[a-z][a-z0-9-]{0,62}")
_ID = re.compile(r"-(\d{6})-(\d{6})-")  # in a run's id: when it was made


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
        self._base = ""  # "checkpoints/" where SageMaker brought it home

    def attempts(self) -> list[AttachedAttempt]:
        """Return the run's attempts, the oldest first; raises BadRequest where there is no history."""
        newest: dict[int, tuple[str, str]] = {}
        first: dict[int, str] = {}
        run_ids = set()
        for base in ("", "checkpoints/"):
            for name in self.files.sizes(f"{base}history"):
                if match := _RECORD.fullmatch(name):
                    run_ids.add(match[1])
                    number = int(match[2])
                    newest[number] = max(newest.get(number, ("", "")), (match[3], name))
                    first[number] = min(first.get(number, match[3]), match[3])
            if newest:
                self._base = base
                break
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
            data = self.files.read(f"{self._base}history/{newest[number][1]}", MOST_RECORD)
            record = _record(data, run_id, number)
            if record is not None:
                superseded = number < max(newest)
                attempts.append(_attempt(record, run_id, number, first[number], self.uri, superseded))
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

    def bring(self, attempt_id: str, into: Path, what: tuple[str, ...]) -> None:
        """Copy the run's folders below a folder."""
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            self.files.bring(name, into / name)
        if self._base and self.uri.startswith("s3://"):  # SageMaker's own archives (backends/sagemaker/request.py)
            from cloudtrain.backends import s3

            aws = self.files.aws  # type: ignore[attr-defined]
            for name, archive in (("model", "model.tar.gz"), ("outputs", "output.tar.gz")):
                if name in what:
                    s3.download_archive(aws, f"{self.uri}/{attempt_id}/output/{archive}", into / name)

    def _streams(self, attempt_id: str) -> dict[int, list[_Stream]]:
        """Return the starts of every node, each with its pieces, up to MOST_LOG bytes."""
        streams: dict[tuple[int, str], _Stream] = {}
        whole = 0
        for name, size in sorted(self.files.sizes(f"{self._base}logs/{attempt_id}").items()):
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
                    name = f"{self._base}logs/{attempt_id}/node-{node}/{stream.start}/{number:08d}"
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


def _record(data: bytes | None, run_id: str, number: int) -> dict[str, Any] | None:
    """Return a run.json that is one, of this run and attempt; raises BackendError for one of a newer cloudtrain."""
    try:
        record = json.loads(data or b"null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("version"), int) and record["version"] > VERSION:
        raise BackendError(f"the history of {run_id} was written by a newer cloudtrain", "pip install -U cloudtrain")
    if (record.get("version"), record.get("run_id"), record.get("attempt")) != (VERSION, run_id, number):
        return None
    cleaned: dict[str, Any] = _clean(record)
    return cleaned


def _attempt(
    record: Mapping[str, Any], run_id: str, number: int, start: str, uri: str, superseded: bool
) -> AttachedAttempt:
    about = _mapping(record.get("about"))
    job = _job(about.get("job"), run_id)
    orders, bundle = _mapping(record.get("manifest")), _mapping(about.get("bundle"))
    argv = orders.get("argv")
    plan = Plan(
        backend=_word(about.get("backend")) or _word(record.get("platform")) or "attached",
        run_id=run_id,
        attempt=number,
        request={},
        bundle={
            "sha256": str(bundle.get("sha256") or "")[:64],
            "source_sha256": str(bundle.get("source_sha256") or "")[:64],
            "size_bytes": _count(bundle.get("size_bytes"), 0),
            "files": _count(bundle.get("files"), 0),
            "commit": str(bundle["commit"])[:64] if bundle.get("commit") else None,
            "dirty": bundle.get("dirty") is True,
        },
        manifest={
            "run_id": run_id,
            "attempt": number,
            "argv": [argument for argument in argv if isinstance(argument, str)] if isinstance(argv, list) else [],
            "nodes": _count(orders.get("nodes"), 1),
            "processes_per_node": _count(orders.get("processes_per_node"), 1),
            "gpus_per_node": _count(orders.get("gpus_per_node"), 0),
            "max_runtime_s": _count(orders.get("max_runtime_s"), 0),
            "secrets": {},
        },
        job=job,
        target=_word(job.get("target")),
    )
    patch, left_out = about.get("patch"), about.get("left_out")
    origin = {
        "source": str(job.get("source") or ""),
        "bundle": plan.bundle["sha256"],
        "source_sha256": plan.bundle["source_sha256"],
        "commit": plan.bundle["commit"],
        "dirty": plan.bundle["dirty"],
        "text": patch if isinstance(patch, str) else "",
        "left_out": [text for text in left_out if isinstance(text, str)] if isinstance(left_out, list) else [],
        "attached": uri,
    }
    return AttachedAttempt(uri, plan, _status(record, uri, superseded), _created(run_id, number, start), origin)


def _status(record: Mapping[str, Any], uri: str, superseded: bool) -> Status:
    name = record.get("state")
    state = State(name) if isinstance(name, str) and name in State.__members__ else State.STARTING
    code, reason = record.get("exit_code"), record.get("reason")
    started, ended = _moment(record.get("started_at")), _moment(record.get("ended_at"))
    reported = Status(
        state,
        code if isinstance(code, int) and not isinstance(code, bool) and -1 < code < 256 else None,
        reason[:1000] if isinstance(reason, str) else "",
        started,
        ended if state.final else None,
    )
    last_report = _moment(record.get("updated_at"))
    if state.final:
        return reported
    if superseded:
        return Status(State.LOST, None, "another attempt has begun since", started, last_report)
    since = seconds_since(last_report) if last_report else 0.0
    if since > SILENT_S:
        return Status(
            State.LOST, None, f"its launcher wrote to {uri} for the last time at {last_report}", started, last_report
        )
    return reported


def _job(data: object, run_id: str) -> dict[str, Any]:
    """Return a job that is one, else only a name: what it names is shown, and never submitted."""
    from cloudtrain.job.job import Job

    if isinstance(data, dict):
        try:
            job = Job.from_dict(data).to_dict()
            patterns = job.get("metrics") or {}
            return {**job, "metrics": {name: text for name, text in patterns.items() if _is_simple(text)}}
        except (CloudtrainError, ValueError, TypeError):
            pass
    return {"name": _ID.split(run_id)[0]}


def _is_simple(pattern: str) -> bool:
    """Return whether a regular expression cannot take for ever: nothing in it is repeated that repeats or chooses itself."""
    repeats = len(re.findall(r"(?<!\\)[*+{]", re.sub(r"\[[^\]]*\]", "x", pattern)))
    return len(pattern) <= 300 and repeats <= 3 and not re.search(r"\)[*+{?]|\(\?[=!<]|\\[1-9]|\(\?P=", pattern)


def _created(run_id: str, number: int, start: str) -> str:
    """Return when an attempt was made: the first one's moment is in the run's id, a start's in its own name."""
    match = _ID.search(run_id) if number == 1 else None
    text, form = (f"{match[1]}{match[2]}", "%y%m%d%H%M%S") if match else (start[:22], "%Y%m%dT%H%M%S.%f")
    try:
        return format_time(datetime.strptime(text, form).replace(tzinfo=UTC))
    except ValueError:
        return now()


def _clean(value: Any) -> Any:
    """Return plain data without what a terminal would obey, and without numbers that no field of ours can have."""
    if isinstance(value, str):
        text = value[:MOST_TEXT]
        return text if text.isprintable() else "".join(c for c in text if c.isprintable() or c in "\n\t")
    if isinstance(value, dict):
        return {_clean(name): _clean(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return 0 if isinstance(value, int) and abs(value) >= 1 << 53 else value


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _word(value: object) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else ""


def _count(value: object, default: int) -> int:
    return (
        int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12 else default
    )


def _moment(value: object) -> str | None:
    if not (isinstance(value, str) and _MOMENT.fullmatch(value)):
        return None
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return None
    return value
