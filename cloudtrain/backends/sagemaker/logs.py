"""The log of a training job in CloudWatch: the streams of all nodes, as lines that come once and in order.

A node has one stream for every start of its container: `<job>/algo-<N>-<time>`. The launcher numbers its lines at the
source, so that late and doubled ones are seen for what they are; what others print (an image's own words) has number -1.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple

from cloudtrain import events
from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine, State

GROUP = "/aws/sagemaker/TrainingJobs"
GAP_MS = 60_000  # a missing line is not waited for when lines come that are this much younger
_OURS = re.compile(r"(\d+) (-?\d+) (\d{4}-\d\d-\d\dT[\d:.]+Z) (.*)", re.DOTALL)
_STREAM = re.compile(r".*/algo-(\d+)-(.+)")
_FINAL = frozenset(state.value for state in State if state.final)


@dataclass(frozen=True)
class Place:
    """How far one node was read; its text is the node's part of a cursor."""

    stream: int = 0  # of the node's streams, one for every start
    at_ms: int = 0  # of the last event
    foreign: int = 0  # lines of others that were read at that very time
    seq: int = 0  # the next number in this stream
    base: int = 0  # lines in the streams before: a node's numbers go on
    ended: int = 0  # the launcher has said its last word

    def __str__(self) -> str:
        return f"{self.stream}.{self.at_ms}.{self.foreign}.{self.seq}.{self.base}.{self.ended}"


class _Event(NamedTuple):
    at_ms: int
    seq: int  # -1: not the launcher's
    rank: int
    at: str
    text: str


def places(cursor: str | None, nodes: int) -> list[Place]:
    """Return where to go on for every node; raises BadRequest for what is no cursor."""
    try:
        found = [Place(*map(int, part.split("."))) for part in cursor.split(",")] if cursor else []
    except (TypeError, ValueError):
        raise BadRequest(f"{cursor!r} is no cursor of a log", "cloudtrain logs --json shows them") from None
    return found + [Place()] * (nodes - len(found))


def read(aws: Aws, job: str, known: list[Place], *, over: bool) -> Iterator[LogLine]:
    """Yield what is behind the places, by time, in order on each node, and move the places along; blocking.

    `over`: nothing more will be written, so that a missing line is not waited for. Raises AwsError.
    """
    streams = _streams(aws, job)
    known += [Place()] * (max(streams, default=-1) + 1 - len(known))
    words = [str(place) for place in known]
    nodes = [_node(aws, names, node, known[node], over) for node, names in sorted(streams.items())]
    merged = nodes[0] if len(nodes) == 1 else heapq.merge(*nodes, key=itemgetter(1))
    for node, at, event, place in merged:
        known[node] = place
        words[node] = str(place)
        seq = event.seq + place.base if event.seq >= 0 else -1
        yield LogLine(at, node, event.rank, seq, event.text, ",".join(words))


def _streams(aws: Aws, job: str) -> dict[int, list[str]]:
    """Return the names of each node's streams, oldest first; none before the job has written anything."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    token: dict[str, str] = {}
    while True:
        try:
            page = aws.ask("logs", "describe_log_streams", logGroupName=GROUP, logStreamNamePrefix=f"{job}/", **token)
        except AwsError as error:
            if error.code == "ResourceNotFoundException":
                return {}
            raise
        for stream in page.get("logStreams", []):
            name = str(stream["logStreamName"])
            if parts := _STREAM.fullmatch(name):
                found.setdefault(int(parts[1]) - 1, []).append((int(stream.get("creationTime") or 0), parts[2], name))
        if not page.get("nextToken"):
            return {node: [name for _, _, name in sorted(names)] for node, names in found.items()}
        token = {"nextToken": page["nextToken"]}


def _node(
    aws: Aws, names: Sequence[str], node: int, place: Place, over: bool
) -> Iterator[tuple[int, str, _Event, Place]]:
    """Yield a node's lines with the place behind each."""
    while place.stream < len(names):
        last = place.stream == len(names) - 1
        found = _events(aws, names[place.stream], place.at_ms)
        for event, behind in _in_order(found, place, over or not last):
            place = behind
            yield node, event.at, event, place
        if last:
            return
        place = Place(stream=place.stream + 1, base=place.base + place.seq)


def _in_order(found: Iterable[_Event], place: Place, over: bool) -> Iterator[tuple[_Event, Place]]:
    """Drop what was read before, and hold a line back while one before it is missing."""
    held: dict[int, _Event] = {}
    skip, skip_at = place.foreign, place.at_ms
    newest = 0

    def ready() -> Iterator[tuple[_Event, Place]]:
        nonlocal place
        while (event := held.pop(place.seq, None)) is not None:
            place = _behind(place, event)
            yield event, place

    for event in found:
        newest = max(newest, event.at_ms)
        if event.seq < 0:
            if event.at_ms == skip_at and skip:
                skip -= 1
                continue
            place = _behind(place, event)
            yield event, place
        elif event.seq >= place.seq:
            held.setdefault(event.seq, event)
            yield from ready()
            while held and newest - held[min(held)].at_ms >= GAP_MS:
                place = replace(place, seq=min(held))
                yield from ready()
    while held and over:
        place = replace(place, seq=min(held))
        yield from ready()


def _behind(place: Place, event: _Event) -> Place:
    at_ms = max(place.at_ms, event.at_ms)
    foreign = (place.foreign if at_ms == place.at_ms else 0) + (event.seq < 0 and event.at_ms == at_ms)
    ended = place.ended or (event.seq >= 0 and event.rank == -1 and _is_last_word(event.text))
    seq = event.seq + 1 if event.seq >= 0 else place.seq
    return replace(place, at_ms=at_ms, foreign=foreign, seq=seq, ended=int(ended))


def _is_last_word(text: str) -> bool:
    found = events.parse(text)
    return found is not None and found[0] == "state" and found[1].get("state") in _FINAL


def _events(aws: Aws, stream: str, since_ms: int) -> Iterator[_Event]:
    """Yield a stream's events from a time on, page by page: the same token again means that there is no more."""
    token: dict[str, str] = {}
    while True:
        try:
            page = aws.ask(
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
        yield from map(_event, page.get("events", []))
        following = page.get("nextForwardToken")
        if not following or following == token.get("nextToken"):
            return
        token = {"nextToken": following}


def _event(raw: Any) -> _Event:
    at_ms, message = int(raw["timestamp"]), str(raw["message"]).rstrip("\n")
    if parts := _OURS.fullmatch(message):
        return _Event(at_ms, int(parts[1]), int(parts[2]), parts[3], parts[4])
    at = datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return _Event(at_ms, -1, -1, at, message)
