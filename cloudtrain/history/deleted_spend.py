"""What deleted runs have spent: a line for each attempt in `spent.jsonl` of a home, which costs and budgets count."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.errors import DiskError

FILE = "spent.jsonl"


def append(home: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows with `run_id`, `attempt`, `created_at` and what was spent; raises DiskError where they cannot be written."""
    lines = "".join(json.dumps(dict(row)) + "\n" for row in rows)
    if not lines:
        return
    path = home / FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, lines.encode())  # one write: lines of several processes do not mix
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DiskError(path, error) from None


def read(home: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows, each attempt once; lines that are none are left out."""
    seen: set[tuple[object, object]] = set()
    try:
        text = (home / FILE).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskError(home / FILE, error) from None
    for line in text.splitlines():
        try:
            row = json.loads(line)
            key = row["run_id"], row["attempt"]
        except (ValueError, KeyError, TypeError):
            continue
        if key not in seen:  # a removal that was interrupted is repeated
            seen.add(key)
            yield row
