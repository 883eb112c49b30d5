"""Writing for people: plain when piped, coloured and fitted on a terminal, which obeys nothing in a job's text."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from cloudtrain.cli.view import columns

BATCH = 2000  # lines written at once
DELAY_S = 0.02  # how long a line may wait for others
# CSI; OSC, DCS, PM, APC, SOS up to their end on the line; any other escape; C0 without tab, DEL, C1
_CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c)|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]"
)


def clean(text: str) -> str:
    """Return one line without what a terminal would obey: escape sequences and control characters other than tab."""
    return text if text.isprintable() else _CONTROL.sub("", text)


def is_terminal(stream: TextIO | None = None) -> bool:
    return (stream or sys.stdout).isatty()


def obeys(stream: TextIO | None = None) -> bool:
    """Return whether this is a terminal that obeys escape sequences."""
    import os

    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def say(*lines: str, style: str = "") -> None:
    """Print lines of our own to standard output; `style` (bold, green, red, ...) is seen on a terminal only."""
    begin, end = _codes(sys.stdout, style)
    for line in lines:
        sys.stdout.write(f"{begin}{clean(line)}{end}\n")


def write(*lines: str) -> None:
    """Print lines that are ours to the last character, colours included."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def colours(stream: TextIO | None = None) -> bool:
    """Return whether colours are shown: not on a pipe, a dumb terminal, or under NO_COLOR."""
    import os

    return obeys(stream) and not os.environ.get("NO_COLOR")


def width(stream: TextIO | None = None) -> int:
    """Return how many columns a stream's terminal has, standard output's where none is named; 80 where nobody says."""
    import os
    import shutil

    if stream:
        with suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns


def height() -> int:
    """Return how many lines standard output's terminal has; 24 where nobody says."""
    import shutil

    return shutil.get_terminal_size().lines


def _codes(stream: TextIO, style: str) -> tuple[str, str]:
    """Return what switches a style on and off; nothing where colours are not shown."""
    if not style or not colours(stream):
        return "", ""
    return "".join(f"\x1b[{_STYLES[word]}m" for word in style.split()), "\x1b[0m"


_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def note(line: str, *, head: str = "", style: str = "") -> None:
    """Print a remark beside the output, to standard error; `head` stands before it in a style."""
    begin, end = _codes(sys.stderr, style)
    sys.stderr.write(f"{begin}{head}{end}{clean(line)}\n")
    sys.stderr.flush()


def pairs(rows: Iterable[tuple[str, str]], indent: str = "  ") -> None:
    """Print labels and values, one pair a line, aligned; a value of several lines goes on below."""
    found = [(label, value) for label, value in rows if value]
    width = max((len(label) for label, _ in found), default=0)
    for label, value in found:
        for number, line in enumerate(value.splitlines()):
            say(f"{indent}{label if not number else '':<{width}}  {line}")


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    styles: dict[str, str] | None = None,
    spare: Sequence[str] = (),
) -> None:
    """Print a table: columns of `right` stand right; on a terminal with `styles` by a cell's text, long cells folded.

    Where a terminal is too narrow, columns of `spare` are left out, the first of them first.
    """
    rows = [list(headers), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(columns.cells(row[at]) for row in rows) for at in range(len(headers))]
    kept = list(range(len(headers)))
    if is_terminal():
        kept = _fitting(headers, widths, spare)
        whole = [headers[at] in ("run", "state", "name") for at in kept]
        widths = columns.fitted([widths[at] for at in kept], whole, width())
    for number, row in enumerate(rows):
        of_row = [_codes(sys.stdout, (styles or {}).get(row[at], "") if number else "bold") for at in kept]
        for line in columns.lines([row[at] for at in kept], widths):
            texts = [columns.pad(line[at], widths[at], headers[kept[at]] in right) for at in range(len(kept))]
            texts[-1] = texts[-1].rstrip()
            shown = (" " * columns.GAP).join(
                f"{begin}{text}{end}" for (begin, end), text in zip(of_row, texts, strict=True)
            )
            sys.stdout.write(shown.rstrip() + "\n")


def _fitting(headers: Sequence[str], widths: Sequence[int], spare: Sequence[str]) -> list[int]:
    """Return the columns that are shown on a terminal of this width."""
    kept = list(range(len(headers)))
    for head in spare:
        if sum(widths[at] + columns.GAP for at in kept) - columns.GAP <= width():
            break
        kept = [at for at in kept if headers[at] != head]
    return kept


def print_json(data: Any, *, indent: int | None = None) -> None:
    """Print one JSON value on one line, or indented."""
    import json

    sys.stdout.write(json.dumps(data, indent=indent, ensure_ascii=False, default=str) + "\n")


def show_json(text: str) -> None:
    """Print JSON text for a person: on a terminal coloured, with every character beyond ASCII escaped."""
    if is_terminal():
        import json

        text = _TOKEN.sub(_coloured, json.dumps(json.loads(text), indent=2) + "\n")
    sys.stdout.write(text)


_TOKEN = re.compile(
    r'(?P<key>"(?:[^"\\]|\\.)*")(?=:)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>true|false|null)|(?P<number>-?\d[\d.eE+-]*)'
)
_OF_TOKEN = {"key": "cyan", "text": "green", "word": "yellow", "number": "bold"}


def _coloured(found: re.Match[str]) -> str:
    begin, end = _codes(sys.stdout, _OF_TOKEN[str(found.lastgroup)])
    return f"{begin}{found.group()}{end}"


class Lines:
    """Many lines to standard output, in batches: at 200,000 lines a second as fast as they come, else at once.

    A thread writes what has waited for `DELAY_S`, so that a reader which blocks for the next line never holds back the
    last one. A context manager; raises BrokenPipeError when nobody reads any more.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._waiting: list[str] = []
        self._some = threading.Event()
        self._lock = threading.Lock()
        self._pause = threading.Event()  # set by nobody: what waits for it sleeps
        self._closed = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Lines:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self._some.set()
        self._thread.join()
        self.flush()

    def add(self, line: str) -> None:
        """Take one line, without its end."""
        self._waiting.append(line)
        if not self._some.is_set():
            self._some.set()
        if len(self._waiting) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Write what waits; blocks while the reader is slow."""
        with self._lock:
            if self._error:
                raise self._error
            lines = self._waiting[:]
            if lines:
                del self._waiting[: len(lines)]  # a line that was added since stays
                self._write(lines)
                self._out.flush()

    def _write(self, lines: list[str]) -> None:
        self._out.write("\n".join([*lines, ""]))

    def _serve(self) -> None:
        while not self._closed:
            self._some.wait()
            self._some.clear()
            self._pause.wait(DELAY_S)
            try:
                self.flush()
            except OSError as error:
                self._error = error
                return
