"""Print to the terminal: plain text on a pipe, colours and fitted tables on a terminal, no control sequences of a job."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from cloudtrain.cli.view import columns
from cloudtrain.events import show_marks

BATCH = 2000  # lines written at once
DELAY_S = 0.02  # how long a line may wait for more lines
# CSI; OSC, DCS, PM, APC, SOS up to their end on the line; any other escape; C0 without tab, DEL, C1
_CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]"
)


def clean(text: str) -> str:
    """Remove escape sequences and control characters, except tab, from a line; show direction marks as \\u202e."""
    return text if text.isprintable() else show_marks(_CONTROL.sub("", text))


def is_terminal(stream: TextIO | None = None) -> bool:
    return (stream or sys.stdout).isatty()


def supports_escapes(stream: TextIO | None = None) -> bool:
    """Return whether a stream is a terminal that supports escape sequences."""
    import os

    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def print_lines(*lines: str, style: str = "") -> None:
    """Print lines to standard output, cleaned of control sequences; `style` (bold, green, ...) shows on a terminal only."""
    begin, end = _style_codes(sys.stdout, style)
    for line in lines:
        sys.stdout.write(f"{begin}{clean(line)}{end}\n")


def print_raw(*lines: str) -> None:
    """Print lines unchanged, colours included. Use it only for text without a job's output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def colours(stream: TextIO | None = None) -> bool:
    """Return whether to print colours: not on a pipe, on a dumb terminal, or with NO_COLOR set."""
    import os

    return supports_escapes(stream) and not os.environ.get("NO_COLOR")


def width(stream: TextIO | None = None) -> int:
    """Return the columns of a stream's terminal (default: standard output); 80 where they are not known."""
    import os
    import shutil

    if stream:
        with suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns


def height() -> int:
    """Return the lines of standard output's terminal; 24 where they are not known."""
    import shutil

    return shutil.get_terminal_size().lines


def _style_codes(stream: TextIO, style: str) -> tuple[str, str]:
    """Return the escape sequences that start and end a style; "" where colours are off."""
    if not style or not colours(stream):
        return "", ""
    return "".join(f"\x1b[{_STYLES[name]}m" for name in style.split()), "\x1b[0m"


_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def note(line: str, *, prefix: str = "", style: str = "") -> None:
    """Print a note to standard error, after a `prefix` in a style."""
    begin, end = _style_codes(sys.stderr, style)
    sys.stderr.write(f"{begin}{prefix}{end}{clean(line)}\n")
    sys.stderr.flush()


def confirmer(*, yes: bool, as_json: bool, verb: str = "submit", done: str = "submitted") -> Callable[[str], None]:
    """Return a function that asks a person about a sentence, and raises BadRequest where nobody is asked or says no."""

    def confirm(sentence: str) -> None:
        if yes:
            return
        from cloudtrain.errors import BadRequest

        if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise BadRequest(f"{sentence}: nothing was {done}", f"use --yes to {verb} without asking")
        import click

        if not click.confirm(f"{clean(sentence)}. {verb.capitalize()} it?", err=True):
            raise BadRequest(f"nothing was {done}")

    return confirm


def print_pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Print aligned labels and values, without empty ones; a value may have several lines. A terminal gets folded ones."""
    nonempty = [(label, value) for label, value in rows if value]
    label_width = max((len(label) for label, _ in nonempty), default=0)
    margin = " " * (label_width + 4)
    for label, value in nonempty:
        for number, line in enumerate(value.splitlines()):
            print_folded(f"  {label if not number else '':<{label_width}}  {line}", margin)


def print_folded(line: str, margin: str) -> None:
    """Print a line; on a terminal it is folded between words, and what follows stands behind `margin`."""
    if len(line) <= width() or not is_terminal():
        return print_lines(line)
    import textwrap

    return print_lines(
        *textwrap.wrap(line, width(), subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
    )


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    styles: dict[str, str] | None = None,
    spare: Sequence[str] = (),
) -> None:
    """Print a table. On a terminal it folds long cells and styles a cell by its text (`styles`).

    `right` names the columns to align right. On a narrow terminal the columns of `spare` are left out, in their order, and named.
    """
    rows = [list(headers), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(columns.display_width(row[index]) for row in rows) for index in range(len(headers))]
    kept = list(range(len(headers)))
    if is_terminal():
        kept = _fitting_columns(headers, widths, spare)
        whole = [headers[index] in ("run", "state", "name") for index in kept]
        widths = columns.fit_widths([widths[index] for index in kept], whole, width())
    for number, row in enumerate(rows):
        cell_styles = [
            _style_codes(sys.stdout, (styles or {}).get(row[index], "") if number else "bold") for index in kept
        ]
        for line in columns.row_lines([row[index] for index in kept], widths):
            texts = [
                columns.pad(line[index], widths[index], headers[kept[index]] in right) for index in range(len(kept))
            ]
            texts[-1] = texts[-1].rstrip()
            text_line = (" " * columns.GAP).join(
                f"{begin}{text}{end}" for (begin, end), text in zip(cell_styles, texts, strict=True)
            )
            sys.stdout.write(text_line.rstrip() + "\n")
    if left_out := [head for index, head in enumerate(headers) if index not in kept]:
        note(f"left out of a narrow terminal: {', '.join(left_out)}")


def _fitting_columns(headers: Sequence[str], widths: Sequence[int], spare: Sequence[str]) -> list[int]:
    """Return the indices of the columns that fit into the terminal."""
    kept = list(range(len(headers)))
    for head in spare:
        if sum(widths[index] + columns.GAP for index in kept) - columns.GAP <= width():
            break
        kept = [index for index in kept if headers[index] != head]
    return kept


def print_json(data: Any, *, indent: int | None = None) -> None:
    """Print one JSON value on one line, or indented."""
    import json

    sys.stdout.write(json.dumps(data, indent=indent, ensure_ascii=False, default=str) + "\n")


def print_coloured_json(text: str) -> None:
    """Print JSON text; on a terminal with colours, and non-ASCII characters escaped."""
    if is_terminal():
        import json

        text = _TOKEN.sub(_coloured, json.dumps(json.loads(text), indent=2) + "\n")
    sys.stdout.write(text)


_TOKEN = re.compile(
    r'(?P<key>"(?:[^"\\]|\\.)*")(?=:)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>true|false|null)|(?P<number>-?\d[\d.eE+-]*)'
)
_TOKEN_STYLES = {"key": "cyan", "text": "green", "word": "yellow", "number": "bold"}


def _coloured(match: re.Match[str]) -> str:
    begin, end = _style_codes(sys.stdout, _TOKEN_STYLES[str(match.lastgroup)])
    return f"{begin}{match.group()}{end}"


class LineWriter:
    """Write lines to standard output in batches, up to 200,000 lines a second.

    A thread writes lines that have waited for `DELAY_S`, so that a caller that blocks for the next line does not delay the
    last one. A context manager; raises BrokenPipeError when the reader has closed the pipe.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._waiting: list[str] = []
        self._some = threading.Event()
        self._lock = threading.Lock()
        self._pause = threading.Event()  # never set: waiting for it is a sleep
        self._closed = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> LineWriter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self._some.set()
        self._thread.join()
        self.flush()

    def add(self, line: str) -> None:
        """Add one line, without its newline."""
        self._waiting.append(line)
        if not self._some.is_set():
            self._some.set()
        if len(self._waiting) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines; blocks while the reader is slow."""
        with self._lock:
            if self._error:
                raise self._error
            lines = self._waiting[:]
            if lines:
                del self._waiting[: len(lines)]  # keeps lines that were added meanwhile
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


@contextmanager
def raw_mode(active: bool = True) -> Iterator[None]:
    """Let the terminal of standard input pass each key on as it is typed, Ctrl-C too; as it was afterwards."""
    if not active:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is kept
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
