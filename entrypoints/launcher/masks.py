"""Mask secrets in whatever is logged or written: as they are, escaped, URL-encoded and in base64."""

from __future__ import annotations

import json
import re
from binascii import b2a_base64
from collections.abc import Iterator

SHORTEST = 4  # characters; a shorter text would be masked all over the log
UNRESERVED = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~"  # RFC 3986, section 2.3
# What stays as it is in none, quote() of Python, encodeURIComponent() and encodeURI() of JavaScript.
LEFT = (b"", b"/", b"!*'()", b";,/?:@&=+$#!*'()")
WRAPPED = 76  # characters of a line of base64, as `base64` and MIME (RFC 2045) print it
_WORD = bytes(116 if byte in UNRESERVED[:-2] + b"+/%" else 32 for byte in range(256))
_RUNS = (72, 20, 0)
_FEW = 10  # forms that are found sooner than the longest word


class Masks:
    """What is shown as ***. Most of a log has no word as long as a secret's: it is searched for short forms only."""

    def __init__(self) -> None:
        self._forms: list[tuple[bytes, int]] = []  # the longest first, each with how long a word it stands in

    @property
    def longest(self) -> int:
        """Bytes of the longest form."""
        return len(self._forms[0][0]) if self._forms else 0

    def hide(self, *values: str) -> None:
        """Show these values as *** from now on, in every form."""
        found = {form for form, _ in self._forms}.union(*map(forms, values))
        self._forms = [(form, _run(form.translate(_WORD))) for form in sorted(found, key=len, reverse=True)]

    def apply(self, data: bytes) -> bytes:
        """Return data with every form in it replaced."""
        most = _RUNS[0] if len(self._forms) <= _FEW else _run(data.translate(_WORD))
        for form, run in self._forms:
            if run <= most:
                data = data.replace(form, b"***")
        return data


def _run(words: bytes) -> int:
    return next(run for run in _RUNS if b"t" * run in words)


def forms(value: str) -> set[bytes]:
    """Return what to look for. A text of several lines is looked for line by line, in base64 as a whole."""
    found: set[bytes] = set()
    for text in _escaped(value):
        for line in text.replace("\r", "\n").split("\n"):
            if len(line.strip()) >= SHORTEST:
                raw = line.strip().encode("utf-8", "surrogateescape")
                found |= {raw, *_percent(raw)}
    raw = value.strip().encode("utf-8", "surrogateescape")
    return found | {form for form in (*_percent(raw), *_base64(raw)) if len(form) > SHORTEST}


def _escaped(value: str) -> Iterator[str]:
    """Yield the text, in JSON, in JSON within JSON (an event that holds an answer of a server), and as Python's repr."""
    yield value
    yield repr(value)[1:-1]
    for ascii_only in (True, False):
        inner = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
        yield inner
        yield inner.replace("/", "\\/")  # as PHP and some JavaScript write it
        yield json.dumps(inner, ensure_ascii=ascii_only)[1:-1]


def _percent(raw: bytes) -> Iterator[bytes]:
    for left in LEFT:
        for code in (b"%%%02X", b"%%%02x"):
            text = re.sub(b"[^%b]" % re.escape(UNRESERVED + left), lambda match, code=code: code % ord(match[0]), raw)
            yield from (text, text.replace(b"%20", b"+"))


def _base64(raw: bytes) -> Iterator[bytes]:
    """Yield the characters that every base64 text has in which these bytes stand, at whatever distance from its start."""
    for offset in range(3):
        bits = 8 * (offset + len(raw))
        text = b2a_base64(bytes(offset) + raw, newline=False)[-(-8 * offset // 6) : bits // 6]
        yield from (text, text.translate(bytes.maketrans(b"+/", b"-_")))
        if not offset:
            yield from (text[at : at + WRAPPED] for at in range(0, len(text), WRAPPED))
