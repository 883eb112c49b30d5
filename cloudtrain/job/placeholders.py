"""Placeholders such as {model_dir} in a job's arguments and environment; each node replaces them by its own values.

entrypoints/launcher/placeholders.py, which does that, has the same pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_NAMES = (
    r"model_dir|output_dir|checkpoint_dir|run_id|attempt|input:[A-Za-z][A-Za-z0-9_-]*"
    r"|role\.[a-z][a-z0-9-]*\.(?:host|addresses)"
)
PATTERN = rf"\{{\{{(?P<literal>{_NAMES})\}}\}}|\{{(?P<name>{_NAMES})\}}"


def used(text: str) -> bool:
    """Return whether a node will change the text."""
    return "{" in text and re.search(PATTERN, text) is not None


def unquoted(value: object) -> str:
    """Return the placeholder that YAML read as a mapping, for it has no quotes: {model_dir} is {"model_dir": null}."""
    if not isinstance(value, Mapping) or len(value) != 1 or None not in value.values():
        return ""
    text = f"{{{next(iter(value))}}}"
    return text if used(text) or text == "{checkpoint}" else ""


def names(text: str) -> Iterator[str]:
    """Yield the placeholders of a text, without their braces."""
    if "{" in text:
        yield from (match["name"] for match in re.finditer(PATTERN, text) if match["name"])


def inputs(text: str) -> Iterator[str]:
    """Yield the names of the inputs whose paths the text asks for."""
    yield from (name[len("input:") :] for name in names(text) if name.startswith("input:"))


def roles(text: str) -> Iterator[str]:
    """Yield the roles whose addresses the text asks for."""
    yield from (name.split(".")[1] for name in names(text) if name.startswith("role."))


def variable(name: str) -> str:
    """Return the variable that holds in a shell what a placeholder stands for."""
    if name.startswith("input:"):
        name = "input_" + name[len("input:") :]
    word = re.sub(r"\W", "_", name).upper()
    return f"$CLOUDTRAIN_{word}"
