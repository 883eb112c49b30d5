"""Merge the logs of an attempt's pods, live or saved, so that every line is returned once.

The launcher numbers its lines, so a line is recognized whether it comes from the pod or from the saved log. Lines without
a number were printed before the launcher started; they are counted instead. When the cluster restarts a node, the new pod
counts from 0 again: line numbers of restart n begin at n * SEQ_PER_START.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cloudtrain import events
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine

_LINE = re.compile(r"(\d+) (-?\d+) (\d{4}-\d\d-\d\dT[\d:.]+Z) (.*)", re.DOTALL)
SEQ_PER_START = 1_000_000_000  # line numbers reserved for one start of a node
LONGEST_LINE = 16 << 20  # bytes


class PodStart(NamedTuple):
    """One pod of a node: its creation or launcher start time (20261122T061500Z) and its uid."""

    created_at: str
    uid: str


NO_POD = PodStart("", "")


class NodeLog:
    """How far one node's log has been read: pod, next line number, count of unnumbered lines, time of the last line."""

    def __init__(
        self,
        node: int,
        start: int = 0,
        pod: PodStart = NO_POD,
        next_seq: int = 0,
        unnumbered: int = 0,
        last_time: str = "",
    ) -> None:
        self.node, self.start, self.pod = node, start, pod
        self.next, self.unnumbered, self.last_time = next_seq, unnumbered, last_time
        self.gap = False  # lines between the last known one and the pod's first one are missing

    @property
    def cursor(self) -> str:
        return f"{self.node}:{self.start}:{self.pod.created_at}:{self.pod.uid}:{self.next}:{self.unnumbered}:{self.last_time}"

    def switch_pod(self, pod: PodStart) -> None:
        """Continue with another pod of this node."""
        if self.next or self.unnumbered:
            self.start += 1
        self.pod, self.next, self.unnumbered, self.last_time = pod, 0, 0, ""

    def parse_new_lines(self, lines: Iterable[str]) -> Iterator[tuple[str, int, int, str]]:
        """Yield (time, rank, line number, text) of the lines of a log that were not read before."""
        unnumbered, self.gap = 0, False
        for line in lines:
            match = _LINE.fullmatch(line)
            if match is None:
                if line and self.next == 0:
                    unnumbered += 1
                    if unnumbered > self.unnumbered:
                        self.unnumbered = unnumbered
                        yield "", -1, -1, line
                continue
            seq = int(match[1])
            if seq > self.next:
                self.gap = True
                return
            if seq == self.next:
                self.next, self.last_time = seq + 1, match[3]
                yield match[3], int(match[2]), self.start * SEQ_PER_START + seq, match[4]


class LogMerger:
    """Merges the logs of all nodes after a cursor; raises BadRequest for an invalid cursor."""

    def __init__(self, nodes: int, after: str | None = None) -> None:
        self.nodes = [NodeLog(node) for node in range(nodes)]
        try:
            for node_cursor in (after or "").split(",") if after else ():
                node, start, created_at, uid, seq, unnumbered, last_time = node_cursor.split(":", 6)
                pod = PodStart(created_at, uid)
                self.nodes[int(node)] = NodeLog(int(node), int(start), pod, int(seq), int(unnumbered), last_time)
        except (ValueError, IndexError):
            raise BadRequest(
                f"{after!r} is not a log cursor", "cloudtrain logs --json prints the cursor of each line"
            ) from None

    def add_lines(self, node: int, lines: Iterable[str], began: str) -> Iterator[LogLine]:
        """Yield the new ones of a node's log lines; `began` is the time for lines without one."""
        for last_time, rank, seq, line in self.nodes[node].parse_new_lines(lines):
            cursor = ",".join(log.cursor for log in self.nodes if log.pod.uid)
            yield LogLine(last_time or began, node, rank, seq, line, cursor)


def split_lines(chunks: Iterable[bytes], *, all_of_it: bool = True) -> Iterator[str]:
    """Yield the lines of a log that arrives in chunks, of any length; `all_of_it`: the last one without an end, too.

    A log can be larger than memory. A line over LONGEST_LINE bytes, which the launcher does not write, comes in pieces.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        yield from (line.decode("utf-8", "replace") for line in lines)
    if all_of_it and rest:
        yield rest.decode("utf-8", "replace")


def parse_launcher_result(message: str) -> Mapping[str, Any] | None:
    """Return the launcher's final result event from the last lines of its log, or None."""
    launcher_result = None
    for line in message.split("\n"):
        match = _LINE.fullmatch(line)
        event = events.parse(match[4]) if match and match[2] == "-1" else None
        if event and event[0] == "result":
            launcher_result = event[1]
    return launcher_result
