"""Placeholders such as {model_dir} in a job's arguments and environment; each node replaces them by its own values.

entrypoints/launcher/placeholders.py, which does that, has the same pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PATTERN = (
    r"\{\{(?P<literal>model_dir|output_dir|checkpoint_dir|run_id|attempt|input:[A-Za-z][A-Za-z0-9_-]*)\}\}"
    r"|\{(?P<name>model_dir|output_dir|checkpoint_dir|run_id|attempt|input:[A-Za-z][A-Za-z0-9_-]*)\}"
)


def used(text: str) -> bool:
    """Return whether a node will change the text."""
    return "{" in text and re.search(PATTERN, text) is not None


def inputs(text: str) -> Iterator[str]:
    """Yield the names of the inputs whose paths the text asks for."""
    if "{input:" in text:
        for match in re.finditer(PATTERN, text):
            name = match["name"]
            if name and name.startswith("input:"):
                yield name[len("input:") :]
