"""Cloud Logging's entries.list over what replicas print; entries may come late, or twice, on command."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.simulators.http import Answer, Refusal, Request, Route

PAGE = 1000
CUT = 100_000  # characters; a longer line is cut, as the service would
_TERM = re.compile(r'\s*([\w.]+)\s*(>=|<=|!=|=|>|<|:)\s*("(?:[^"\\]|\\.)*"|[^\s()]+)\s*')
Entry = dict[str, Any]


class Entries:
    """The log of every job, one file for each."""

    def __init__(self, folder: Path, project: str) -> None:
        self._folder, self._project = folder, project
        self._lock = threading.Lock()
        self._entries: dict[str, list[tuple[float, Entry]]] = {}  # by job: when it can be seen, and what
        self._count = 0
        self.late_every, self.late_s = 0, 0.0  # every so many entries one comes so late
        self.twice_every = 0  # every so many entries one is listed twice
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.jsonl"):
            with path.open(encoding="utf-8") as file:
                self._entries[path.stem] = [(0.0, json.loads(line)) for line in file if line.endswith("\n")]

    @property
    def routes(self) -> list[Route]:
        return [("POST", r"/v2/entries:list", self._list)]

    def write(self, job: str, task: str, texts: list[str], severity: str = "INFO") -> None:
        """Append lines that a replica (or `service`, the platform) has printed."""
        at = time.time()
        with self._lock, (self._folder / f"{job}.jsonl").open("a", encoding="utf-8") as file:
            kept = self._entries.setdefault(job, [])
            for text in texts:
                self._count += 1
                entry = {
                    "insertId": f"{self._count:08x}{time.time_ns():x}",
                    "logName": f"projects/{self._project}/logs/{task}",
                    "resource": {
                        "type": "ml_job",
                        "labels": {"job_id": job, "task_name": task, "project_id": self._project},
                    },
                    "timestamp": stamp(at),
                    "receiveTimestamp": stamp(at),
                    "severity": severity,
                    "jsonPayload": {"message": text[:CUT]},
                }
                late = self.late_s if self.late_every and self._count % self.late_every == 0 else 0.0
                kept.append((at + late, entry))
                file.write(json.dumps(entry) + "\n")

    def _list(self, request: Request) -> Answer:
        body = request.json
        if not body.get("resourceNames"):
            raise Refusal(400, "resourceNames is required")
        fits = selector(str(body.get("filter", "")))
        now = time.time()
        with self._lock:
            known = [(seen, entry) for kept in self._entries.values() for seen, entry in kept]
        found = [entry for seen, entry in known if seen <= now and fits(entry)]
        found.sort(key=lambda entry: str(entry["timestamp"]), reverse=body.get("orderBy") == "timestamp desc")
        if self.twice_every:
            found = [entry for n, entry in enumerate(found) for _ in range(2 if n % self.twice_every == 0 else 1)]
        first = int(body.get("pageToken") or 0)
        size = min(int(body.get("pageSize") or 50), PAGE)
        page = found[first : first + size]
        more = {"nextPageToken": str(first + size)} if first + size < len(found) else {}
        return Answer({**({"entries": page} if page else {}), **more})


def selector(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return what a filter of a Google API stands for: comparisons joined by AND; raises Refusal."""
    terms, at = [], 0
    while at < len(text):
        found = _TERM.match(text, at)
        if not found:
            raise Refusal(400, f"Unparseable filter: {text[at:][:80]!r}")
        value = json.loads(found[3]) if found[3].startswith('"') else found[3]
        terms.append((found[1].split("."), found[2], str(value)))
        joint = re.compile(r"AND\b").match(text, found.end())
        if not joint and found.end() < len(text):
            raise Refusal(400, f"Unparseable filter: {text[found.end() :][:80]!r}")
        at = joint.end() if joint else found.end()
    return lambda entry: all(_fits(entry, *term) for term in terms)


def _fits(entry: Mapping[str, Any], path: list[str], operator: str, value: str) -> bool:
    found: Any = entry
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None:
        return operator == "!="
    text = str(found)
    if operator == ":":
        return value.lower() in text.lower()
    if path == ["timestamp"]:
        text, value = _padded(text), _padded(value)
    return {"=": text == value, "!=": text != value, ">=": text >= value, "<=": text <= value, ">": text > value,
            "<": text < value}[operator]  # fmt: skip


def _padded(time_text: str) -> str:
    """Return a time with as many digits behind the point as any."""
    whole, _, part = time_text.rstrip("Z").partition(".")
    return f"{whole}.{part:0<9}"


def stamp(seconds: float) -> str:
    """Return a time in seconds since 1970 as UTC, ISO 8601 with microseconds."""
    whole = int(seconds)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((seconds - whole) * 1e6):06d}Z"
