"""Shorten the native request of a plan for a person: without what the launcher alone reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAUNCHER = ("CLOUDTRAIN_", "ct_manifest_")  # the job once more, packed, and places on the node
LINES = 3  # a text with so many line breaks is unreadable as JSON
LONGEST = 400  # characters of a text


def shorten(request: Any) -> tuple[Any, int]:
    """Return a request with only what a person would check, and how many values were left out or cut."""
    if isinstance(request, Mapping):
        inner = {name: shorten(value) for name, value in request.items() if not str(name).startswith(LAUNCHER)}
        hidden = len(request) - len(inner) + sum(count for _, count in inner.values())
        return {name: value for name, (value, _) in inner.items()}, hidden
    if isinstance(request, list | tuple):
        entries = [shorten(entry) for entry in request if not _is_launchers(entry)]
        return [entry for entry, _ in entries], len(request) - len(entries) + sum(count for _, count in entries)
    if isinstance(request, str) and len(request) > LONGEST:
        return f"{request[:LONGEST]}... ({len(request):,} characters)", 1
    return request, 0


def take_out_texts(request: Any, path: str = "") -> tuple[Any, dict[str, str]]:
    """Return a request with a remark instead of each text of several lines, such as a batch script, and these by path."""
    texts: dict[str, str] = {}
    if isinstance(request, str) and request.count("\n") >= LINES:
        return f"{request.count(chr(10))} lines, printed below", {path: request}
    if isinstance(request, Mapping):
        found = {
            name: take_out_texts(value, f"{path}.{name}" if path else str(name)) for name, value in request.items()
        }
        for _, inner in found.values():
            texts |= inner
        return {name: value for name, (value, _) in found.items()}, texts
    if isinstance(request, list | tuple):
        entries = [take_out_texts(entry, f"{path}[{number}]") for number, entry in enumerate(request)]
        for _, inner in entries:
            texts |= inner
        return [value for value, _ in entries], texts
    return request, texts


def _is_launchers(entry: Any) -> bool:
    """Return whether an entry is a variable: {"name": ..., "value": ...} or NAME=VALUE, as Akash writes it."""
    if isinstance(entry, str):
        return entry.startswith(LAUNCHER) and "=" in entry
    return isinstance(entry, Mapping) and str(entry.get("name", "")).startswith(LAUNCHER) and len(entry) <= 2
