"""Tracebacks in the lines that a process has left: where each begins and ends, what raised it, and which belong together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

HEAD = re.compile(r"Traceback \(most recent call last\):\s*$")
FRAME = re.compile(r'^\s*File "([^"]*)", line \d+')
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_TYPE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")
CHAINED = ("direct cause of the following exception", "another exception occurred")
_SURVIVED = ("--- Logging error ---", "Exception ignored in")


@dataclass
class Raised:
    """A traceback: its last line, what follows that, the file and text of its innermost frame."""

    at: int  # index of the exception's line
    chained: bool  # raised while the one before was handled
    file: str = ""
    code: str = ""


def find(texts: Sequence[str]) -> list[Raised]:
    """Return the tracebacks of some lines, in order."""
    found: list[Raised] = []
    at, chained = 0, False
    while at < len(texts):
        text = texts[at]
        if any(words in text for words in CHAINED):
            chained = True
        elif HEAD.search(text) or (text.startswith('  File "') and not found):
            survived = any(words in before for before in texts[max(0, at - 2) : at] for words in _SURVIVED)
            indent = len(text) - len(text.lstrip()) if HEAD.search(text) and text[:1] == " " else 0
            one = Raised(-1, chained)
            chained = False
            at += 0 if text.startswith('  File "') else 1
            while at < len(texts):
                inner = texts[at][indent:]
                if frame := FRAME.match(inner):
                    one.file, one.code = frame[1], ""
                elif inner.strip() and not inner[:1].isspace() and not inner.startswith(("+", "|")):
                    break
                elif inner.strip(" ^~") and not one.code:
                    one.code = inner.strip()
                at += 1
            if (
                at < len(texts)
                and (_RAISED.match(texts[at][indent:]) or _TYPE.match(texts[at][indent:]))
                and not survived
            ):
                one.at = at
                found.append(one)
            elif at < len(texts):
                continue  # cut off: this line may begin another one
        at += 1
    return found
