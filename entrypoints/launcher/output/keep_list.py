"""The list of a node's kept files, beside the run's outputs: their sizes, and what the source had in their places."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from .keep_copy import is_inside
from .keep_source import Summary
from .script_files import PART


def path_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"node-{rank}.json")


def write(folder: str, rank: int, sizes: Mapping[str, int], before: Mapping[str, Summary] | None) -> str:
    """Return "" or what went wrong."""
    path = path_of(folder, rank)
    known = None if before is None else {name: before[name] for name in sizes if name in before}
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path + PART, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump({"files": sizes, "source": known}, file, ensure_ascii=False)
        os.replace(path + PART, path)
    except OSError as error:
        return f"the list of kept files cannot be written: {error.strerror or error}"
    return ""


def read(folder: str, rank: int) -> tuple[dict[str, int], dict[str, Summary] | None]:
    """Return the sizes, and what the source had: None where that is not known."""
    try:
        with open(path_of(folder, rank), encoding="utf-8", errors="surrogateescape") as file:
            record = json.load(file)
        names = {str(name): int(size) for name, size in record["files"].items() if is_inside(str(name))}
        source = record.get("source")
        return names, source and {str(name): (int(size), int(check)) for name, (size, check) in source.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, None
