"""List the run's folders on this node under the names that their files have in the store."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from . import store

State = tuple[int, int]  # size and time of change of a file that was uploaded


def list_files(folders: Mapping[str, str], below: str = "") -> dict[str, str]:
    """Return name in the store -> path of all regular files (links to files count), below one folder of it."""
    paths = {}
    for top, folder in folders.items():
        if below and below != top and not below.startswith(f"{top}/"):
            continue
        for subfolder, _, names in os.walk(os.path.join(folder, below[len(top) + 1 :]) if below else folder):
            inner = os.path.relpath(subfolder, folder).replace(os.sep, "/")
            for name in names:
                path = os.path.join(subfolder, name)
                if os.path.isfile(path) and f"/{store.PARTIAL}" not in path:
                    paths["/".join(part for part in (top, inner if inner != "." else "", name) if part)] = path
    return paths


def named(path: str) -> dict[str, tuple[int, int]]:
    """Return the files that a mark names, with size and node: 0 for this one. None where it is another tool's."""
    try:
        with open(path, "rb") as file:
            files = json.loads(file.read())["files"]
        return {str(name): (int(entry["size"]), int(entry.get("node", 0))) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def state_of(path: str) -> State | None:
    """Return size and time of change, None for a file that is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
