"""Read an attempt's log from Cloud Logging and merge its entries into lines: each line once, in order on each node.

Entries can arrive late or twice. The launcher numbers its lines: lines after a gap wait until the missing line arrives, or
until `settle_s` has passed. After a restart by the platform the numbers begin with 0 again, so each restart adds a
thousand million to them. Lines without a number (the platform's own) are identified by their insertId.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain import events
from cloudtrain.backends.google import ApiError, GoogleApi
from cloudtrain.backends.vertex.status import console_url, has_ended
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine, State
from cloudtrain.job.units import format_time, unix_time

DENIED = "denied"  # the cursor behind the line which says that the log may not be read
OVERLAP_S = 5.0  # the log is read again from twice settle_s and this much earlier; known lines are dropped
NUMBERS_PER_START = 1_000_000_000  # line numbers reserved for one start of a node
_LINE = re.compile(r"(\d+) (-?\d+) (\d{4}-\d\d-\d\dT[\d:.]+Z) (.*)", re.DOTALL)
_FINAL = frozenset(str(state) for state in State if state.final)


class JobLogs:
    """The logs of one project's jobs. Every call blocks; raises BackendError."""

    def __init__(self, api: GoogleApi, project: str, *, settle_s: float, pause_s: float) -> None:
        self._api, self._project = api, project
        self._settle_s, self._pause_s = settle_s, pause_s

    def lines(
        self, get_job: Callable[[], Mapping[str, Any] | None], *, follow: bool, after: str | None
    ) -> Iterator[LogLine]:
        """Yield the log lines of a job's nodes after a cursor; with `follow` until the job has ended.

        `get_job` returns the job as the API describes it, None where it does not exist.
        """
        denied = after == DENIED
        merge = LogMerge(None if denied else after)
        while True:
            job = get_job()
            if job is None:
                return
            final = has_ended(job)
            try:
                merge.add(self._entries(job, merge.newest))
            except ApiError as error:
                if error.status != 403 and not (error.status == 429 and not final):
                    raise
                if error.status == 403 and not denied:
                    denied = True
                    url = console_url(str(job["name"]), self._project)
                    message = f"{error.message}; grant roles/logging.viewer, or open {url}"
                    yield LogLine(format_time(self._api.clock.now()), 0, -1, 0, message, DENIED)
            now = self._api.clock.now()
            over = final and (
                denied or "startTime" not in job or now - unix_time(str(job["endTime"])) >= self._settle_s
            )
            yield from merge.ready(format_time(now - self._settle_s), everything=over)
            if over or (final and merge.complete(_count_nodes(job))) or (not follow and not final):
                return
            self._api.clock.sleep(self._pause_s)

    def _entries(
        self, job: Mapping[str, Any], newest: str, more: str = "", order: str = "timestamp asc"
    ) -> Iterator[Any]:
        """Yield the Cloud Logging entries of a job, from a little before the newest known line on."""
        since = format_time(unix_time(newest) - 2 * self._settle_s - OVERLAP_S) if newest else str(job["createTime"])
        number = str(job["name"]).rpartition("/")[2]
        text = f'resource.type="ml_job" AND resource.labels.job_id="{number}" AND timestamp>="{since}"{more}'
        body = {"resourceNames": [f"projects/{self._project}"], "filter": text, "orderBy": order, "pageSize": 1000}
        while True:
            page = self._api.call("POST", "logging", "/v2/entries:list", "the log cannot be read", body=body).json
            yield from page.get("entries", ())
            if not page.get("nextPageToken"):
                return
            body["pageToken"] = page["nextPageToken"]

    def result_event(self, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the launcher's `result` event of a job, None if it has not arrived or may not be read."""
        only = ' AND jsonPayload.message:"::cloudtrain::{\\"kind\\":\\"result\\""'
        try:
            return final_result(self._entries(job, "", only, "timestamp desc"))
        except ApiError as error:
            if error.status in (403, 429):
                return None
            raise


@dataclass
class _NodeState:
    start: int = 0  # how often the platform has restarted it
    next: int = 0  # the expected line number
    last: tuple[str, int] = ("", -1)  # time and number of the last line that was yielded
    done: bool = False  # the launcher has printed its final state
    waiting: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)


class LogMerge:
    """Merges log entries into lines, from a cursor on; raises BadRequest for an invalid cursor."""

    def __init__(self, after: str | None = None) -> None:
        self._nodes: dict[int, _NodeState] = {}
        self._unnumbered: dict[tuple[str, str], tuple[int, str]] = {}
        self._last_unnumbered = ("", "")
        self._node_cursors: dict[int, str] = {}  # node -> its part of the cursor
        self._unnumbered_cursor = ""
        try:
            self._parse_cursor(after or "")
        except (ValueError, IndexError):
            raise BadRequest(
                f"{after!r} is not a log cursor", "cloudtrain logs --json prints the cursor of each line"
            ) from None

    @property
    def newest(self) -> str:
        """The time of the newest line that was yielded, "" before the first."""
        return max((node.last[0] for node in self._nodes.values()), default="")

    def complete(self, nodes: int) -> bool:
        """Return whether all nodes have printed their final state and all lines were yielded."""
        nodes_seen = self._nodes.values()
        return (
            len(nodes_seen) >= nodes
            and all(node.done and not node.waiting for node in nodes_seen)
            and not self._unnumbered
        )

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Add the entries of an entries.list answer; known ones are dropped."""
        for entry in entries:
            payload = entry.get("jsonPayload") or {}
            text = str(payload.get("message", entry.get("textPayload", "")))
            node = node_of(str(entry["resource"]["labels"].get("task_name", "")))
            parts = _LINE.fullmatch(text)
            if parts and node is not None:
                state = self._nodes.setdefault(node, _NodeState())
                key = (parts[3], int(parts[1]))
                if key > state.last:
                    state.waiting[key] = (int(parts[2]), parts[4])
            elif text:
                entry_id = (str(entry["timestamp"]), str(entry.get("insertId", "")))
                if entry_id > self._last_unnumbered:
                    self._unnumbered[entry_id] = (node or 0, text)

    def ready(self, before: str, everything: bool = False) -> Iterator[LogLine]:
        """Yield the lines that are complete; lines after a gap only if they are older than `before`, or with `everything`."""
        lines: list[tuple[str, int, int, int, str, str]] = []
        for rank, node in self._nodes.items():
            for (at, seq), (process_rank, text) in sorted(node.waiting.items()):
                if seq != node.next:
                    if not (everything or at < before or (seq == 0 and node.done)):
                        break  # the missing line may still arrive
                    if seq < node.next:
                        node.start += 1
                del node.waiting[at, seq]
                node.next, node.last = seq + 1, (at, seq)
                node.done = _is_final_state(text)
                number = node.start * NUMBERS_PER_START + seq
                lines.append(
                    (at, rank, process_rank, number, text, f"{rank}:{node.start}.{seq}.{at}" + "!" * node.done)
                )
        for entry_id, (rank, text) in sorted(self._unnumbered.items()):
            node_state = self._nodes.get(rank, _NodeState())
            number = node_state.start * NUMBERS_PER_START + max(node_state.last[1], 0)
            lines.append((entry_id[0], rank, -1, number, text, "+" + " ".join(entry_id)))
            self._last_unnumbered = entry_id
        self._unnumbered.clear()
        for at, rank, process_rank, number, text, cursor in sorted(lines, key=lambda line: line[0]):
            if cursor.startswith("+"):
                self._unnumbered_cursor = cursor
            else:
                self._node_cursors[rank] = cursor
            joined = ",".join(self._node_cursors[rank] for rank in sorted(self._node_cursors)) + self._unnumbered_cursor
            yield LogLine(at, rank, process_rank, number, text, joined)

    def _parse_cursor(self, after: str) -> None:
        numbered, plus, unnumbered = after.partition("+")
        for part in numbered.split(",") if numbered else ():
            rank, _, rest = part.partition(":")
            start, seq, at = rest.split(".", 2)
            last = (at.rstrip("!"), int(seq))
            self._nodes[int(rank)] = _NodeState(int(start), int(seq) + 1, last, at.endswith("!"))
            self._node_cursors[int(rank)] = part
        if plus:
            self._last_unnumbered = (unnumbered.split(" ")[0], unnumbered.split(" ")[1])
            self._unnumbered_cursor = plus + unnumbered


def _count_nodes(job: Mapping[str, Any]) -> int:
    return sum(int(pool.get("replicaCount", 0)) for pool in job["jobSpec"]["workerPoolSpecs"])


def final_result(entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the launcher's result of the attempt: the newest `result` event of the node with the lowest rank."""
    results: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for entry in entries:
        line = _LINE.fullmatch(str((entry.get("jsonPayload") or {}).get("message", entry.get("textPayload", ""))))
        event = events.parse(line[4]) if line and line[2] == "-1" else None
        node = node_of(str(entry["resource"]["labels"].get("task_name", "")))
        if line and event and event[0] == "result" and node is not None:
            results[node] = max(results.get(node, ("", {})), (line[3], event[1]), key=lambda pair: pair[0])
    return results[min(results)][1] if results else None


def node_of(task: str) -> int | None:
    """Return the node rank of a replica's name: workerpool0-0 is 0, workerpool1-2 is 3; None for other names."""
    match = re.fullmatch(r"workerpool([01])-(\d+)", task)
    return int(match[1]) + int(match[2]) if match else None


def _is_final_state(text: str) -> bool:
    event = events.parse(text)
    return event is not None and event[0] == "state" and event[1].get("state") in _FINAL
