"""Simulates Cloud Logging's entries.list for the output of replicas, with late or duplicate entries on command."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.job.units import format_time
from cloudtrain.simulators.http import ApiError, Request, Response, Route, paginate

PAGE = 1000
MAX_LINE = 100_000  # characters; the service truncates longer lines too
_TERM = re.compile(r'\s*(NOT\s+)?([\w.-]+)\s*(>=|<=|!=|=|>|<|:)\s*("(?:[^"\\]|\\.)*"|[^\s()]+)\s*')
Entry = dict[str, Any]


class LogEntries:
    """The log entries of all jobs, one file per job."""

    def __init__(self, folder: Path, project: str, clock: Clock = SYSTEM) -> None:
        self._folder, self._project, self.clock = folder, project, clock
        self._lock = threading.Lock()
        # by job: time when the entry becomes visible, and the entry
        self._entries: dict[str, list[tuple[float, Entry]]] = {}
        self._count = 0
        self.late_every, self.late_s = 0, 0.0  # every n-th entry is visible so much later
        self.twice_every = 0  # every n-th entry is listed twice
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.jsonl"):
            with path.open(encoding="utf-8") as file:
                self._entries[path.stem] = [(0.0, json.loads(line)) for line in file if line.endswith("\n")]

    @property
    def routes(self) -> list[Route]:
        return [("POST", r"/v2/entries:list", self._list)]

    def write(self, job: str, task: str, texts: list[str], severity: str = "INFO") -> None:
        """Append lines that a replica printed, or the platform (task `service`)."""
        at = self.clock.now()
        with self._lock, (self._folder / f"{job}.jsonl").open("a", encoding="utf-8") as file:
            job_entries = self._entries.setdefault(job, [])
            for text in texts:
                self._count += 1
                entry = {
                    "insertId": f"{self._count:08x}{int(self.clock.now() * 1e9):x}",
                    "logName": f"projects/{self._project}/logs/{task}",
                    "resource": {
                        "type": "ml_job",
                        "labels": {"job_id": job, "task_name": task, "project_id": self._project},
                    },
                    "timestamp": format_time(at),
                    "receiveTimestamp": format_time(at),
                    "severity": severity,
                    "jsonPayload": {"message": text[:MAX_LINE]},
                }
                delay_s = self.late_s if self.late_every and self._count % self.late_every == 0 else 0.0
                job_entries.append((at + delay_s, entry))
                file.write(json.dumps(entry) + "\n")

    def _list(self, request: Request) -> Response:
        body = request.json
        if not body.get("resourceNames"):
            raise ApiError(400, "resourceNames is required")
        matches = parse_filter(str(body.get("filter", "")))
        now = self.clock.now()
        with self._lock:
            entries = [
                (visible_at, entry) for job_entries in self._entries.values() for visible_at, entry in job_entries
            ]
        matching = [entry for visible_at, entry in entries if visible_at <= now and matches(entry)]
        matching.sort(key=lambda entry: str(entry["timestamp"]), reverse=body.get("orderBy") == "timestamp desc")
        if self.twice_every:
            matching = [entry for n, entry in enumerate(matching) for _ in range(2 if n % self.twice_every == 0 else 1)]
        size = min(int(body.get("pageSize") or 50), PAGE)
        return paginate("entries", matching, body.get("pageToken") or "", size)


def parse_filter(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Parse a Google API filter into a predicate: comparisons, NOT, OR, and AND, which binds less; raises ApiError."""
    groups: list[list[tuple[bool, list[str], str, str]]] = [[]]
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        if not match:
            raise ApiError(400, f"Unparseable filter: {text[at:][:80]!r}")
        value = json.loads(match[4]) if match[4].startswith('"') else match[4]
        groups[-1].append((match[1] is None, match[2].split("."), match[3], str(value)))
        conjunction = re.compile(r"(AND|OR)\b").match(text, match.end())
        if not conjunction and match.end() < len(text):
            raise ApiError(400, f"Unparseable filter: {text[match.end() :][:80]!r}")
        if conjunction and conjunction[1] == "AND":
            groups.append([])
        at = conjunction.end() if conjunction else match.end()
    return lambda entry: all(
        any(_matches(entry, path, sign, value) is wanted for wanted, path, sign, value in group)
        for group in groups
        if group
    )


def _matches(entry: Mapping[str, Any], path: list[str], operator: str, value: str) -> bool:
    field: Any = entry
    for name in path:
        field = field.get(name) if isinstance(field, Mapping) else None
    if field is None:
        return operator == "!="
    text = str(field)
    if operator == ":":
        return fnmatchcase(text.lower(), f"*{value.lower()}*")
    if path in (["timestamp"], ["create_time"], ["createTime"]):
        text, value = _pad_fraction(text), _pad_fraction(value)
    return {"=": text == value, "!=": text != value, ">=": text >= value, "<=": text <= value, ">": text > value,
            "<": text < value}[operator]  # fmt: skip


def _pad_fraction(time_text: str) -> str:
    """Pad the fraction of a timestamp to nine digits, so that timestamps compare as text."""
    whole, _, part = time_text.rstrip("Z").partition(".")
    return f"{whole}.{part:0<9}"
