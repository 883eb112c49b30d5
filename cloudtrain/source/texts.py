"""The text of a source's files, read once for every note and check that looks at it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".toml", ".json", ".cfg")
LONGEST = 1 << 20  # bytes of a file that are read
MOST_BYTES = 4 << 20  # of all files: every plan and submit waits for it


class Match(NamedTuple):
    """Where a pattern was found."""

    path: str
    line: int
    text: str  # what matched

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"


class Texts:
    """The text files of a source: one megabyte of a file, and four in all, those of `first` before the others.

    Nothing is read before it is needed, and nothing twice.

    Attributes:
        root: the source's folder.
        names: paths of the packaged files.
        entry: the script that runs, where the job names one of these files; else "".
    """

    def __init__(self, root: Path, names: Iterable[str], entrypoint: object = None) -> None:
        self.root, self.names = root, frozenset(names)
        self.entry = next((name for name in _script_paths(entrypoint) if name in self.names), "")
        self.complete = True

    @cached_property
    def files(self) -> dict[str, str]:
        """Path -> text; blocking. `complete` is False afterwards where something was left unread."""
        found: dict[str, str] = {}
        left = MOST_BYTES
        chosen = sorted(name for name in self.names if name.endswith(SUFFIXES))
        for name in sorted(chosen, key=lambda name: (name != self.entry, not name.endswith((".py", ".sh")))):
            if left <= 0:
                self.complete = False
                break
            try:
                with (self.root / name).open("rb") as stream:
                    data = stream.read(min(LONGEST, left) + 1)
            except OSError:
                self.complete = False
                continue
            if len(data) > min(LONGEST, left):
                self.complete = False
                data = data[:-1]
            left -= len(data)
            found[name] = data.decode("utf-8", "replace")
        return found

    @property
    def scripts(self) -> Iterator[tuple[str, str]]:
        """Path and text of the Python files, the entry first."""
        return ((name, text) for name, text in self.files.items() if name.endswith(".py"))

    def find(self, pattern: re.Pattern[str], suffixes: tuple[str, ...] = (".py", ".sh")) -> Match | None:
        """Return the first match of a pattern that is not in a comment."""
        for name, text in self.files.items():
            if name.endswith(suffixes):
                for match in pattern.finditer(text):
                    start = text.rfind("\n", 0, match.start()) + 1
                    if not text[start : match.start()].lstrip().startswith("#"):
                        return Match(name, text.count("\n", 0, start) + 1, match[0])
        return None


def _script_paths(entrypoint: object) -> list[str]:
    """Return the paths that an entrypoint may stand for."""
    if not isinstance(entrypoint, str):
        return []
    if not entrypoint.startswith("-m "):
        return [entrypoint]
    module = entrypoint[3:].replace(".", "/")
    return [f"{module}.py", f"{module}/__main__.py"]
