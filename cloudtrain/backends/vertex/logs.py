"""The lines of an attempt out of Cloud Logging: every line once, in order on each node, although entries come late or twice.

The launcher numbers its lines at the source, so that a gap shows: what comes behind it waits until the missing line has
come, or has had its time (`settle_s`). A start anew by the platform begins with number 0 again; its lines are numbered on
from the next thousand million. Lines without a number (the platform's own) are told apart by Logging's insertId.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cloudtrain import events
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine, State

STARTS = 1_000_000_000  # numbers of one start of a node
_LINE = re.compile(r"(\d+) (-?\d+) (\d{4}-\d\d-\d\dT[\d:.]+Z) (.*)", re.DOTALL)
_FINAL = frozenset(str(state) for state in State if state.final)


@dataclass
class _Node:
    start: int = 0  # how often it was started anew
    next: int = 0  # the number that is expected
    last: tuple[str, int] = ("", -1)  # time and number of the line that was given out last
    done: bool = False  # that one was the launcher's last word
    waiting: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)


class Merge:
    """What is known of an attempt's log behind a cursor; raises BadRequest for what is no cursor."""

    def __init__(self, after: str | None = None) -> None:
        self._nodes: dict[int, _Node] = {}
        self._loose: dict[tuple[str, str], tuple[int, str]] = {}
        self._loose_last = ("", "")
        self._given: dict[int, str] = {}  # the cursor, by node
        self._given_loose = ""
        try:
            self._resume(after or "")
        except (ValueError, IndexError):
            raise BadRequest(f"{after!r} is no cursor of a log", "cloudtrain logs --json shows them") from None

    @property
    def newest(self) -> str:
        """The time of the newest line that was given out, "" before."""
        return max((node.last[0] for node in self._nodes.values()), default="")

    def complete(self, nodes: int) -> bool:
        """Return whether the launchers of all nodes have said their last word, and all of it was given out."""
        known = self._nodes.values()
        return len(known) >= nodes and all(node.done and not node.waiting for node in known) and not self._loose

    def take(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take what entries.list returned; what is known already is dropped."""
        for entry in entries:
            payload = entry.get("jsonPayload") or {}
            text = str(payload.get("message", entry.get("textPayload", "")))
            node = node_of(str(entry["resource"]["labels"].get("task_name", "")))
            found = _LINE.fullmatch(text)
            if found and node is not None:
                here = self._nodes.setdefault(node, _Node())
                key = (found[3], int(found[1]))
                if key > here.last:
                    here.waiting[key] = (int(found[2]), found[4])
            elif text:
                mark = (str(entry["timestamp"]), str(entry.get("insertId", "")))
                if mark > self._loose_last:
                    self._loose[mark] = (node or 0, text)

    def ready(self, before: str, everything: bool = False) -> Iterator[LogLine]:
        """Yield what can be given out: what comes behind a gap only where its time is `before`, or `everything`."""
        found: list[tuple[str, int, int, int, str, str]] = []
        for rank, node in self._nodes.items():
            for (at, seq), (of_rank, text) in sorted(node.waiting.items()):
                if seq != node.next:
                    if not (everything or at < before or (seq == 0 and node.done)):
                        break  # what is missing may still come
                    if seq < node.next:
                        node.start += 1
                del node.waiting[at, seq]
                node.next, node.last = seq + 1, (at, seq)
                node.done = _is_last_word(text)
                number = node.start * STARTS + seq
                found.append((at, rank, of_rank, number, text, f"{rank}:{node.start}.{seq}.{at}" + "!" * node.done))
        for mark, (rank, text) in sorted(self._loose.items()):
            known = self._nodes.get(rank, _Node())
            number = known.start * STARTS + max(known.last[1], 0)
            found.append((mark[0], rank, -1, number, text, "+" + " ".join(mark)))
            self._loose_last = mark
        self._loose.clear()
        for at, rank, of_rank, number, text, cursor in sorted(found, key=lambda line: line[0]):
            if cursor.startswith("+"):
                self._given_loose = cursor
            else:
                self._given[rank] = cursor
            joined = ",".join(self._given[known] for known in sorted(self._given)) + self._given_loose
            yield LogLine(at, rank, of_rank, number, text, joined)

    def _resume(self, after: str) -> None:
        numbered, plus, loose = after.partition("+")
        for part in numbered.split(",") if numbered else ():
            rank, _, rest = part.partition(":")
            start, seq, at = rest.split(".", 2)
            last = (at.rstrip("!"), int(seq))
            self._nodes[int(rank)] = _Node(int(start), int(seq) + 1, last, at.endswith("!"))
            self._given[int(rank)] = part
        if plus:
            self._loose_last = (loose.split(" ")[0], loose.split(" ")[1])
            self._given_loose = plus + loose


def result(entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the launcher's own word on how the attempt ended: the newest `result` event of the lowest node."""
    found: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for entry in entries:
        line = _LINE.fullmatch(str((entry.get("jsonPayload") or {}).get("message", entry.get("textPayload", ""))))
        said = events.parse(line[4]) if line and line[2] == "-1" else None
        node = node_of(str(entry["resource"]["labels"].get("task_name", "")))
        if line and said and said[0] == "result" and node is not None:
            found[node] = max(found.get(node, ("", {})), (line[3], said[1]), key=lambda pair: pair[0])
    return found[min(found)][1] if found else None


def seconds(time_text: str) -> float:
    """Return seconds since 1970 of a time as Google writes it."""
    whole, _, part = time_text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}.{part[:6]:0<6}+00:00").timestamp()


def node_of(task: str) -> int | None:
    """Return the node rank of a replica's name: workerpool0-0 is 0, workerpool1-2 is 3; None for what is no node of ours."""
    found = re.fullmatch(r"workerpool([01])-(\d+)", task)
    return int(found[1]) + int(found[2]) if found else None


def _is_last_word(text: str) -> bool:
    said = events.parse(text)
    return said is not None and said[0] == "state" and said[1].get("state") in _FINAL
