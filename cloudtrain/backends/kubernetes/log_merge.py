"""The lines of an attempt on Kubernetes: from its pods while they are there, from its output when they are gone.

The launcher numbers its lines at the source, so that every line is given out once, whichever way it comes. A line that
has no number is from before the launcher, or from a container that never had one: those are counted instead. A node that
the cluster starts anew is another pod, which begins with number 0: its lines are numbered on from the next thousand million.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cloudtrain import events
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine

_LINE = re.compile(r"(\d+) (-?\d+) (\d{4}-\d\d-\d\dT[\d:.]+Z) (.*)", re.DOTALL)
STARTS = 1_000_000_000  # numbers of one start of a node


class Start(NamedTuple):
    """One pod of a node: when it was made, or its launcher began, as 20261122T061500Z, and its uid."""

    made: str
    uid: str


NONE = Start("", "")


class NodeLog:
    """What was given out of one node's log: of which pod, the next number, the last line's time, how many had no number."""

    def __init__(
        self, node: int, start: int = 0, pod: Start = NONE, next_seq: int = 0, loose: int = 0, at: str = ""
    ) -> None:
        self.node, self.start, self.pod = node, start, pod
        self.next, self.loose, self.at = next_seq, loose, at
        self.gap = False  # what the pod gave began behind what is known

    @property
    def mark(self) -> str:
        return f"{self.node}:{self.start}:{self.pod.made}:{self.pod.uid}:{self.next}:{self.loose}:{self.at}"

    def begin(self, pod: Start) -> None:
        """Go on with another pod of this node."""
        if self.next or self.loose:
            self.start += 1
        self.pod, self.next, self.loose, self.at = pod, 0, 0, ""

    def new(self, text: str) -> Iterator[tuple[str, int, int, str]]:
        """Yield (time, rank, number, text) of the lines in a text that are new."""
        loose, self.gap = 0, False
        for line in text.split("\n"):
            found = _LINE.fullmatch(line)
            if found is None:
                if line and self.next == 0:
                    loose += 1
                    if loose > self.loose:
                        self.loose = loose
                        yield "", -1, -1, line
                continue
            seq = int(found[1])
            if seq > self.next:
                self.gap = True
                return
            if seq == self.next:
                self.next, self.at = seq + 1, found[3]
                yield found[3], int(found[2]), self.start * STARTS + seq, found[4]


class Merge:
    """The logs of all nodes behind a cursor; raises BadRequest for what is no cursor."""

    def __init__(self, nodes: int, after: str | None = None) -> None:
        self.nodes = [NodeLog(node) for node in range(nodes)]
        try:
            for mark in (after or "").split(",") if after else ():
                node, start, made, uid, seq, loose, at = mark.split(":", 6)
                pod = Start(made, uid)
                self.nodes[int(node)] = NodeLog(int(node), int(start), pod, int(seq), int(loose), at)
        except (ValueError, IndexError):
            raise BadRequest(f"{after!r} is no cursor of a log", "cloudtrain logs --json shows them") from None

    def take(self, node: int, text: str, began: str) -> Iterator[LogLine]:
        """Yield what is new in a node's text; `began` is the time of what has none."""
        for at, rank, seq, line in self.nodes[node].new(text):
            cursor = ",".join(known.mark for known in self.nodes if known.pod.uid)
            yield LogLine(at or began, node, rank, seq, line, cursor)


def result(message: str) -> Mapping[str, Any] | None:
    """Return the launcher's own word on how an attempt ended, from the last lines of its log."""
    found = None
    for line in message.split("\n"):
        parts = _LINE.fullmatch(line)
        said = events.parse(parts[4]) if parts and parts[2] == "-1" else None
        if said and said[0] == "result":
            found = said[1]
    return found
