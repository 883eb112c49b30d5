"""Keeps credentials out of bundles: names and contents that are refused by default.

Thin on purpose: what has a form of its own, documented by its issuer, and is hardly ever found by chance. A refusal
names file, line and kind, never the credential. Not searched: files over MAX_BYTES and binary ones (a zero byte among
the first 8,192); our own example values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cloudtrain.errors import BadSource
from cloudtrain.source import refusal, shown

MAX_BYTES = 4 << 20  # a larger file is judged by its name alone
_BINARY_AT = 8192


class Finding(NamedTuple):
    """A place that looks like a credential; no line means that the file's name does."""

    path: str
    line: int | None
    kind: str


class Pattern(NamedTuple):
    """A kind of credential: one of `needles` is in every one, `form` decides; `source` documents the form."""

    kind: str
    needles: tuple[bytes, ...]
    form: re.Pattern[bytes]
    source: str


def _pattern(kind: str, needles: str, form: bytes, source: str) -> Pattern:
    return Pattern(kind, tuple(needle.encode() for needle in needles.split("|")), re.compile(form), source)


PATTERNS: tuple[Pattern, ...] = ()


def suspicious_name(path: str) -> str:
    """Return the kind of credential that files of this name hold, or an empty string."""
    return ""


def search(path: str, data: bytes) -> list[Finding]:
    """Return what looks like credentials in a whole file."""
    return []


def refuse(findings: Iterable[Finding], allowed: Sequence[str]) -> None:
    """Raise BadSource that names every finding outside of the allowed files."""


_ = (BadSource, refusal, shown, _BINARY_AT)
