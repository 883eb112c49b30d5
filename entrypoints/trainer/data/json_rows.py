"""Rows of a .json file that is one array, read one at a time: memory does not grow with the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20  # characters that are read at a time
_LITERAL = 16  # characters: a word such as -Infinity, a number or an escape may be cut where a chunk ends
_decode = json.JSONDecoder().raw_decode


class NotJson(ValueError):
    """A file, or a line of it, that is no JSON."""

    def __init__(self, line: int, error: json.JSONDecodeError) -> None:
        super().__init__(f"is not JSON: {error.msg} at column {error.colno}")
        self.line = line


def json_rows(file: Path) -> Iterator[Any]:
    """Yield each value of a file's array, or the file's only value; raises NotJson."""
    with open(file, encoding="utf-8-sig") as stream:
        text = _Text(stream)
        if text.peek() != "[":
            yield text.only_value()
            return
        text.at += 1
        mark = text.peek()
        while mark != "]":
            yield text.value()
            mark = text.peek()
            if mark not in (",", "]"):
                raise text.wrong(json.JSONDecodeError("Expecting ',' delimiter", text.text, text.at))
            text.at += mark == ","
        text.at += 1
        if text.peek():
            raise text.wrong(json.JSONDecodeError("Extra data", text.text, text.at))


class _Text:
    """The part of a file that is in memory, the place in it, and where the part begins in the file."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.text, self.at = stream, "", 0
        self.line, self.column = 1, 0

    def more(self) -> bool:
        """Forget what is read and read on, by as much as is held: a long row is not read often. False: at the end."""
        if not (chunk := self.stream.read(max(CHUNK, len(self.text) - self.at))):
            return False
        gone = self.text[: self.at]
        self.line += gone.count("\n")
        self.column = self.at - gone.rindex("\n") - 1 if "\n" in gone else self.column + self.at
        self.text, self.at = self.text[self.at :] + chunk, 0
        return True

    def peek(self) -> str:
        """Return the next character that is no space, "" at the end."""
        while True:
            while self.at < len(self.text):
                if (letter := self.text[self.at]) not in " \t\n\r":
                    return letter
                self.at += 1
            if not self.more():
                return ""

    def value(self) -> Any:
        """Return the next value; raises NotJson."""
        self.peek()
        while True:
            try:
                found, end = _decode(self.text, self.at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - _LITERAL
                if cut and self.more():
                    continue
                raise self.wrong(error) from None
            length = end - self.at
            if end + _LITERAL <= len(self.text) or not self.more():  # a number may be cut: 1e-
                self.at += length
                return found

    def only_value(self) -> Any:
        """Return the value of the whole file."""
        self.text += self.stream.read()
        try:
            return json.loads(self.text[self.at :])
        except json.JSONDecodeError as error:
            raise self.wrong(json.JSONDecodeError(error.msg, self.text, self.at + error.pos)) from None

    def wrong(self, error: json.JSONDecodeError) -> NotJson:
        """Return the error with its line and column in the file."""
        if error.lineno == 1:
            error.colno += self.column
        return NotJson(self.line + error.lineno - 1, error)
