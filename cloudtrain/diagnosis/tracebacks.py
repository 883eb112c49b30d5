"""Tracebacks in the lines that a process has left: where each begins and ends, what raised it, and which belong together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HEAD = re.compile(r"Traceback \(most recent call last\):\s*$")
FRAME = re.compile(r'^\s*File "([^"]*)", line (\d{1,9})')
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python\d|^<")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_TYPE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")
DIRECT = "direct cause of the following exception"
CHAINED = (DIRECT, "another exception occurred")
_SURVIVED = (
    "--- Logging error ---",
    "Exception ignored in",
    "Error in atexit._run_exitfuncs",
    "Error in sys.excepthook",
    "exception was never retrieved",
)
# What stands above a traceback that the process need not have died of: a thread's, a child's, one that was caught and logged.
_ASIDE = re.compile(r"^Exception in thread |^Process [\w:-]+:\s*$|^(?!.* sagemaker-)[^\"']{0,120}\b(ERROR|CRITICAL)\b")
# Where processes share memory or semaphores: both are files in /dev/shm.
_SHARING = re.compile(r"\b(multiprocess(ing)?|billiard|joblib|loky|plasma)[/\\]|shared_memory|/dev/shm")


class Frame(NamedTuple):
    """One call: its file, line and text."""

    file: str
    line: int
    code: str = ""

    @property
    def is_mine(self) -> bool:
        """Whether it is the job's own code: neither a package's nor Python's."""
        return bool(self.file) and not LIBRARY.search(self.file)


_NOWHERE = Frame("", 0)


@dataclass
class Raised:
    """A traceback: its last line and its calls, the outermost first."""

    at: int  # index of the exception's line
    chained: bool  # raised while the one before was handled
    direct: bool = False  # raised from the one before, which is its cause
    aside: bool = False  # of a thread or a child, or logged: the process itself may live on
    frames: list[Frame] = field(default_factory=list)

    @property
    def innermost(self) -> Frame:
        return self.frames[-1] if self.frames else _NOWHERE

    @property
    def mine(self) -> Frame | None:
        """The innermost call of the job's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_mine), None)

    @property
    def shares(self) -> bool:
        """Whether it was raised where processes share memory or semaphores."""
        return any(_SHARING.search(frame.file) for frame in self.frames)


def find(texts: Sequence[str]) -> list[Raised]:
    """Return the tracebacks of some lines, in order."""
    found: list[Raised] = []
    at, chained, direct = 0, False, False
    while at < len(texts):
        text = texts[at]
        if any(words in text for words in CHAINED):
            chained, direct = True, DIRECT in text
        elif HEAD.search(text) or (text.startswith('  File "') and not found):
            survived = any(words in before for before in texts[max(0, at - 2) : at] for words in _SURVIVED)
            indent = len(text) - len(text.lstrip()) if HEAD.search(text) and text[:1] == " " else 0
            aside = found[-1].aside if chained and found else at > 0 and bool(_ASIDE.search(texts[at - 1]))
            one = Raised(-1, chained, direct, aside)
            chained = direct = False
            at += 0 if text.startswith('  File "') else 1
            while at < len(texts):
                inner = texts[at][indent:]
                if frame := FRAME.match(inner):
                    one.frames.append(Frame(frame[1], int(frame[2])))
                elif inner.strip() and not inner[:1].isspace() and not inner.startswith(("+", "|")):
                    break
                elif inner.strip(" ^~") and one.frames and not one.innermost.code:
                    one.frames[-1] = one.innermost._replace(code=inner.strip())
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
