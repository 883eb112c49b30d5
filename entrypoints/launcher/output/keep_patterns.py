"""Patterns of `keep`: folders and files of the working directory, with *, ?, [abc] and ** for any depth."""

from __future__ import annotations

import re


def literal(pattern: str) -> str:
    """Return the folders at the head of a pattern that hold no wildcard."""
    parts = pattern.strip("/").split("/")
    plain = [part for at, part in enumerate(parts) if not any(set("*?[") & set(each) for each in parts[: at + 1])]
    return "/".join(plain)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return what matches a pattern's files and all that lies below the folders that it names; ** is any depth."""
    parts = pattern.strip("/").split("/")
    text = "".join("(?:[^/]+/)*" if part == "**" else _segment(part) + "/" for part in parts[:-1])
    text += ".*" if parts[-1] == "**" else _segment(parts[-1]) + "(?:/.*)?"
    return re.compile(text + r"\Z", re.DOTALL)


def _segment(part: str) -> str:
    """Return a pattern without slashes as a regular expression: *, ? and [abc]."""
    text, at = "", 0
    while at < len(part):
        end = part.find("]", at + 2) if part[at] == "[" else -1
        if end > 0:
            text += "[" + ("^" + part[at + 2 : end] if part[at + 1] == "!" else part[at + 1 : end]) + "]"
            at = end
        else:
            text += {"*": "[^/]*", "?": "[^/]"}.get(part[at], re.escape(part[at]))
        at += 1
    return text
