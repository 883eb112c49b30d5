"""An append-only log beside the history: who submitted, cancelled and deleted which run, and when.

    <home>/audit.jsonl    one line of JSON for each action; only the owner may read it, and nothing here changes a line

It names runs and machines, and holds no argument, variable or file of a job.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from cloudtrain.errors import DiskError
from cloudtrain.job.units import now

FILE = "audit.jsonl"
FIELDS = ("at", "who", "what", "run", "attempt", "target", "detail")


def append(
    home: Path, what: str, run_id: str, *, attempt: int | None = None, target: str = "", detail: str = ""
) -> dict[str, object]:
    """Add an action before it is done, and return its row; raises DiskError where it cannot be written."""
    given = {
        "at": now(),
        "who": f"{_user()}@{socket.gethostname()}",
        "what": what,
        "run": run_id,
        "attempt": attempt,
        "target": target,
        "detail": detail,
    }
    row: dict[str, object] = {name: value for name, value in given.items() if value not in (None, "")}
    line = json.dumps(row) + "\n"
    path = home / FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(path, error) from None
    return row


def read(home: Path, run_id: str = "") -> Iterator[dict[str, object]]:
    """Yield the actions of runs whose ids begin with `run_id`, the oldest first; lines that are none are left out."""
    try:
        with open(home / FILE, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # a power cut has torn it
                if isinstance(row, dict) and str(row.get("run", "")).startswith(run_id):
                    yield {name: row[name] for name in FIELDS if name in row}
    except FileNotFoundError:
        return


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
