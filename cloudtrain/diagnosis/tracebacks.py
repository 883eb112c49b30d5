"""Find Python tracebacks in a process's log lines: their frames, their exception, and which belong to one chain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cloudtrain.diagnosis.lines import is_line

HEAD = re.compile(r"Traceback \(most recent call last\):\s*$")
FRAME = re.compile(r'^\s*File "([^"]*)", line (\d{1,9})')
_PACKAGE = re.compile(r"site-packages|dist-packages")
_LIBRARY = re.compile(rf"{_PACKAGE.pattern}|/lib/python\d|^<")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::|$)|^[\w.]*(Error|Exception|Interrupt|Exit|Warning)\b")
_DIRECT_CAUSE = "direct cause of the following exception"
CHAINED = (_DIRECT_CAUSE, "another exception occurred")
_HANDLED = (
    "--- Logging error ---",
    "Exception ignored in",
    "Error in atexit._run_exitfuncs",
    "Error in sys.excepthook",
    "exception was never retrieved",
)
# Code that shares memory or semaphores between processes: both are files in /dev/shm.
_SHARED_MEMORY = re.compile(r"\b(multiprocess(ing)?|billiard|joblib|loky|plasma)[/\\]|shared_memory|/dev/shm")


class Frame(NamedTuple):
    """One call: its file, line and code."""

    file: str
    line: int
    code: str = ""

    @property
    def is_own_code(self) -> bool:
        """Whether it is the job's own code: neither a package's nor Python's."""
        return bool(self.file) and not _LIBRARY.search(self.file)

    @property
    def is_in_package(self) -> bool:
        """Whether it is the code of an installed package."""
        return bool(_PACKAGE.search(self.file))

    @property
    def raises(self) -> bool:
        """Whether the job's own code raises the exception here, in its own words."""
        return self.is_own_code and self.code.startswith(("raise ", "raise(", "assert "))


_NO_FRAME = Frame("", 0)


@dataclass
class Traceback:
    """A traceback: the line of its exception and its frames, the outermost first."""

    index: int  # of the exception's line
    chained: bool  # raised while the one before was handled
    direct: bool = False  # raised `from` the one before
    survivable: bool = False  # of a thread or a child, or logged: the process itself may live on
    frames: list[Frame] = field(default_factory=list)

    @property
    def innermost(self) -> Frame:
        return self.frames[-1] if self.frames else _NO_FRAME

    @property
    def own_frame(self) -> Frame | None:
        """The innermost frame of the job's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_own_code), None)

    @property
    def shares_memory(self) -> bool:
        """Whether it was raised where processes share memory or semaphores."""
        return any(_SHARED_MEMORY.search(frame.file) for frame in self.frames)

    @property
    def ends_in_package(self) -> bool:
        """Whether the last frame, the import system's left out, is in an installed package."""
        frames = [frame for frame in self.frames if not frame.file.startswith("<frozen importlib")]
        return bool(frames) and frames[-1].is_in_package


def find_tracebacks(texts: Sequence[str]) -> list[Traceback]:
    """Return the tracebacks in some lines, in order."""
    tracebacks: list[Traceback] = []
    index, chained, direct = 0, False, False
    while index < len(texts):
        text = texts[index]
        if any(phrase in text for phrase in CHAINED):
            chained, direct = True, _DIRECT_CAUSE in text
        elif HEAD.search(text) or (text.startswith('  File "') and not tracebacks):
            handled = any(phrase in line for line in texts[max(0, index - 2) : index] for phrase in _HANDLED)
            indent = len(text) - len(text.lstrip()) if HEAD.search(text) and text[:1] == " " else 0
            if chained and tracebacks:
                survivable = tracebacks[-1].survivable
            else:
                survivable = index > 0 and is_line("survivable", texts[index - 1])
            traceback = Traceback(-1, chained, direct, survivable)
            chained = direct = False
            index += 0 if text.startswith('  File "') else 1
            while index < len(texts):
                line = texts[index][indent:]
                if frame := FRAME.match(line):
                    traceback.frames.append(Frame(frame[1], int(frame[2])))
                elif line.strip() and not line[:1].isspace() and not line.startswith(("+", "|")):
                    break
                elif line.strip(" ^~") and traceback.frames and not traceback.innermost.code:
                    traceback.frames[-1] = traceback.innermost._replace(code=line.strip())
                index += 1
            if index < len(texts):
                if handled or not _EXCEPTION.match(texts[index][indent:]):
                    continue  # cut off: this line may begin another traceback
                traceback.index = index
                tracebacks.append(traceback)
        index += 1
    return tracebacks


def pop_last_chain(tracebacks: list[Traceback]) -> list[Traceback]:
    """Remove the last chain of tracebacks from a list and return it, the first cause in front."""
    chain = [tracebacks.pop()]
    while chain[0].chained and tracebacks:
        chain.insert(0, tracebacks.pop())
    return chain
