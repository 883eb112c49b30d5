"""Read a SageMaker training job's log from CloudWatch: the lines of all nodes, each once and in order.

A node has one stream for every start of its container: `<job>/algo-<N>-<time>`. The launcher numbers its lines, so that
the reader can sort late lines and drop repeated ones. Lines from other programs in the image have the number -1.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from cloudtrain import events
from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.sagemaker import status
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine, State
from cloudtrain.job.units import format_time

GROUP = "/aws/sagemaker/TrainingJobs"
LATE_S = 120.0  # a job's last lines may reach CloudWatch this long after the job has ended
DRAIN_S = 30.0  # how long `follow` waits for these late lines
GAP_MS = 60_000  # a missing line is given up once a line this much newer has come
_NUMBERED_LINE = re.compile(r"(\d+) (-?\d+) (\d{4}-\d\d-\d\dT[\d:.]+Z) (.*)", re.DOTALL)
_STREAM = re.compile(r".*/algo-(\d+)-(.+)")
_FINAL = frozenset(state.value for state in State if state.final)


@dataclass(frozen=True)
class Position:
    """How far one node's log was read; `str` of it is the node's part of a cursor."""

    stream: int = 0  # index among the node's streams, one for every container start
    at_ms: int = 0  # time of the last event that was read
    unnumbered: int = 0  # lines without a number that were read with this same time
    seq: int = 0  # number of the next line in this stream
    base: int = 0  # number of lines in the earlier streams; a node's numbers continue
    ended: int = 0  # 1: the launcher has printed its final state

    def __str__(self) -> str:
        return f"{self.stream}.{self.at_ms}.{self.unnumbered}.{self.seq}.{self.base}.{self.ended}"


class _Event(NamedTuple):
    at_ms: int
    seq: int  # -1: not a line of the launcher
    rank: int
    at: str
    text: str


def parse_cursor(cursor: str | None, nodes: int) -> list[Position]:
    """Return every node's position from a cursor; raises BadRequest for an invalid one."""
    try:
        positions = [Position(*map(int, part.split("."))) for part in cursor.split(",")] if cursor else []
    except (TypeError, ValueError):
        raise BadRequest(
            f"{cursor!r} is not a log cursor", "cloudtrain logs --json prints the cursor of each line"
        ) from None
    return positions + [Position()] * (nodes - len(positions))


def follow(
    aws: Aws,
    job: str,
    look: Callable[[list[Position] | None], Mapping[str, Any] | None],
    after: str | None,
    *,
    more: bool,
    pause_s: float,
) -> Iterator[LogLine]:
    """Yield a job's lines behind a cursor; blocking. Raises AwsError, BadRequest.

    Args:
        aws: Its account and region.
        job: Its name.
        look: Returns DescribeTrainingJob's answer, None without such a job, and is given the positions so far.
        after: The cursor.
        more: Whether to wait for the lines of a job that has not ended.
        pause_s: Seconds between two looks.
    """
    positions: list[Position] | None = None
    drain_until: float | None = None
    while True:
        described = look(positions)
        nodes = status.instance_count(described) if described else 0
        positions = parse_cursor(after, nodes) if positions is None else positions
        final = described is None or status.parse_status(described).state.final
        started = described is not None and status.seconds_since_start(described) is not None
        late = (
            final
            and described is not None
            and started
            and (status.seconds_since_end(described, aws.clock) or LATE_S) < LATE_S
        )
        yield from read_lines(aws, job, positions, over=final and not late)
        if not final and not more:
            return
        if final and (not late or all(position.ended for position in positions)):
            return
        if final:
            drain_until = drain_until or aws.clock.monotonic() + DRAIN_S
            if aws.clock.monotonic() > drain_until:
                yield from read_lines(aws, job, positions, over=True)
                return
        aws.clock.sleep(pause_s)


def read_lines(aws: Aws, job: str, positions: list[Position], *, over: bool) -> Iterator[LogLine]:
    """Yield the lines after the positions, by time and in order on each node, and advance the positions; blocking.

    `over`: nothing more will be written, so a missing line is not waited for. Raises AwsError.
    """
    streams = _list_streams(aws, job)
    positions += [Position()] * (max(streams, default=-1) + 1 - len(positions))
    cursor = [str(position) for position in positions]
    nodes = [_read_node(aws, names, node, positions[node], over) for node, names in sorted(streams.items())]
    merged = nodes[0] if len(nodes) == 1 else heapq.merge(*nodes, key=itemgetter(1))
    for node, at, event, position in merged:
        positions[node] = position
        cursor[node] = str(position)
        seq = event.seq + position.base if event.seq >= 0 else -1
        yield LogLine(at, node, event.rank, seq, event.text, ",".join(cursor))


def _list_streams(aws: Aws, job: str) -> dict[int, list[str]]:
    """Return node -> the names of its log streams, oldest first; {} before the job has written anything."""
    streams: dict[int, list[tuple[int, str, str]]] = {}
    token: dict[str, str] = {}
    while True:
        try:
            page = aws.call("logs", "describe_log_streams", logGroupName=GROUP, logStreamNamePrefix=f"{job}/", **token)
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return {}
            raise
        for stream in page.get("logStreams", []):
            name = str(stream["logStreamName"])
            if parts := _STREAM.fullmatch(name):
                streams.setdefault(int(parts[1]) - 1, []).append((int(stream.get("creationTime") or 0), parts[2], name))
        if not page.get("nextToken"):
            return {node: [name for _, _, name in sorted(names)] for node, names in streams.items()}
        token = {"nextToken": page["nextToken"]}


def _read_node(
    aws: Aws, names: Sequence[str], node: int, position: Position, over: bool
) -> Iterator[tuple[int, str, _Event, Position]]:
    """Yield a node's lines, each with the position after it."""
    while position.stream < len(names):
        last = position.stream == len(names) - 1
        log_events = _read_events(aws, names[position.stream], position.at_ms)
        for event, advanced in _order_lines(log_events, position, over or not last):
            position = advanced
            yield node, event.at, event, position
        if last:
            return
        position = Position(stream=position.stream + 1, base=position.base + position.seq)


def _order_lines(log_events: Iterable[_Event], position: Position, over: bool) -> Iterator[tuple[_Event, Position]]:
    """Drop lines that were read before, and hold a line back while an earlier one is missing."""
    held: dict[int, _Event] = {}
    skip, skip_at = position.unnumbered, position.at_ms
    newest = 0

    def ready() -> Iterator[tuple[_Event, Position]]:
        nonlocal position
        while (event := held.pop(position.seq, None)) is not None:
            position = _advance(position, event)
            yield event, position

    for event in log_events:
        newest = max(newest, event.at_ms)
        if event.seq < 0:
            if event.at_ms == skip_at and skip:
                skip -= 1
                continue
            position = _advance(position, event)
            yield event, position
        elif event.seq >= position.seq:
            held.setdefault(event.seq, event)
            yield from ready()
            while held and newest - held[min(held)].at_ms >= GAP_MS:
                position = replace(position, seq=min(held))
                yield from ready()
    while held and over:
        position = replace(position, seq=min(held))
        yield from ready()


def _advance(position: Position, event: _Event) -> Position:
    at_ms = max(position.at_ms, event.at_ms)
    unnumbered = (position.unnumbered if at_ms == position.at_ms else 0) + (event.seq < 0 and event.at_ms == at_ms)
    ended = position.ended or (event.seq >= 0 and event.rank == -1 and _is_final_state(event.text))
    seq = event.seq + 1 if event.seq >= 0 else position.seq
    return replace(position, at_ms=at_ms, unnumbered=unnumbered, seq=seq, ended=int(ended))


def _is_final_state(text: str) -> bool:
    event = events.parse(text)
    return event is not None and event[0] == "state" and event[1].get("state") in _FINAL


def _read_events(aws: Aws, stream: str, since_ms: int) -> Iterator[_Event]:
    """Yield a stream's events from a time on, page by page. CloudWatch repeats the token on the last page."""
    token: dict[str, str] = {}
    while True:
        try:
            page = aws.call(
                "logs",
                "get_log_events",
                logGroupName=GROUP,
                logStreamName=stream,
                startTime=since_ms,
                startFromHead=True,
                **token,
            )
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return
            raise
        yield from map(_parse_event, page.get("events", []))
        next_token = page.get("nextForwardToken")
        if not next_token or next_token == token.get("nextToken"):
            return
        token = {"nextToken": next_token}


def _parse_event(raw: Any) -> _Event:
    at_ms, message = int(raw["timestamp"]), str(raw["message"]).rstrip("\n")
    if parts := _NUMBERED_LINE.fullmatch(message):
        return _Event(at_ms, int(parts[1]), int(parts[2]), parts[3], parts[4])
    return _Event(at_ms, -1, -1, format_time(at_ms / 1000), message)
