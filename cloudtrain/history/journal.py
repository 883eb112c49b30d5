"""The journal of the history: one line for each attempt, from which a lost row is made again.

`history.journal` is written behind the transaction that stores the intent, and before anything is sent: an attempt that it
does not name was never sent. A line is JSON, a tab and the attempt's id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.backends.api import Plan
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest
from cloudtrain.job.units import format_time, now
from cloudtrain.nodes.files import MOST_REQUEST
from cloudtrain.source import untrusted

_MOST_ID = 512  # bytes of the newest line that hold its id


class Entry(NamedTuple):
    """What is known of an attempt beside the history; `handle` only where the journal has it."""

    plan: Plan
    created_at: str
    identity: str = "restored"
    key: str | None = None
    parent: str | None = None
    handle: str | None = None


class Journal:
    """The journal below a home folder."""

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self.path, self._clock = home / "history.journal", clock

    def add(self, plan: Plan, **columns: str | None) -> None:
        """Append an attempt, with columns of its Entry; raises OSError."""
        text = json.dumps({"plan": asdict(plan), "created_at": now(self._clock), **columns}, separators=(",", ":"))
        self._append(text, plan.attempt_id)

    def _append(self, text: str, attempt_id: str) -> None:
        line = f"\n{text}\t{attempt_id}\n"  # a line that was not written whole ends before it
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode("utf-8", "surrogatepass"))
        finally:
            os.close(file)

    def forget(self, run_id: str, newest: str) -> None:
        """Append that a run was deleted, with the id of the newest attempt of all others; raises OSError."""
        self._append(json.dumps({"removed": run_id}), newest)

    def removed(self) -> set[str]:
        """Return the ids of the runs that were deleted."""
        return {str(data["removed"]) for data in self._lines() if data.get("removed")}

    def newest(self) -> str:
        """Return the id of the attempt that was added last; "" where there is none."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_ID))
                line, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return ""
        return line.rpartition(b"\t")[2].decode("utf-8", "replace") if end else ""

    def entries(self) -> Iterator[Entry]:
        """Yield what is known of the attempts, the oldest first; lines that cannot be read are left out, and deleted runs."""
        found: dict[str, dict[str, Entry]] = {}  # run -> attempt
        for data in self._lines():
            if removed := data.get("removed"):
                found.pop(removed, None)
                continue
            try:
                entry = Entry(**data | {"plan": Plan.from_json(json.dumps(data["plan"]))})
            except (TypeError, KeyError, ValueError, BadRequest):
                continue
            found.setdefault(entry.plan.run_id, {})[entry.plan.attempt_id] = entry
        for entries in found.values():
            yield from entries.values()

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            file = self.path.open(encoding="utf-8", errors="replace", newline="\n")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                with suppress(ValueError):
                    data = json.loads(line.rpartition("\t")[0])
                    if isinstance(data, dict):
                        yield data


def entries_of_folders(runs: Path) -> Iterator[Entry]:
    """Yield what the folders of local runs say of their attempts, for a home that is older than its journal."""
    from cloudtrain.backends import registry
    from cloudtrain.backends.manifest import sent_record

    for path in sorted(runs.glob("*/a*/request.json")):
        run_id, number = path.parent.parent.name, path.parent.name[1:]
        try:
            request = json.loads(untrusted.read_file(path.parent, path.name, MOST_REQUEST))
            sent = sent_record(request["nodes"][0]["env"])
            about = sent["about"]
            plan = Plan(
                registry.DEFAULT, run_id, int(number), request, dict(about.get("bundle") or {}), sent["manifest"],
                {"name": run_id.rsplit("-", 3)[0], **(about.get("job") or {})}, registry.DEFAULT,
            )  # fmt: skip
            yield Entry(plan, format_time(path.stat().st_mtime))
        except (OSError, ValueError, TypeError, KeyError, LookupError, RecursionError, BadRequest):
            continue
