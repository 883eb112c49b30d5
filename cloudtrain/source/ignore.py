"""Ignore files: the lines of every `.gitignore` or `.cloudtrainignore` of a tree, and what they say about a path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.errors import BadSource

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


def matches(lines: Sequence[str], path: str) -> bool:
    """Return whether a file is among those that such lines name; raises ValueError for a line that is no pattern."""
    return bool(lines) and bool(_spec(tuple(lines)).match_file(path))


@cache
def _spec(lines: tuple[str, ...]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


class Rules:
    """The ignore files of one name, each valid below its own folder; a deeper one goes first, its last line first.

    A line that names a folder speaks of all that is in it, unless `like_git`: git asks about every folder on its way
    down, each for itself, and never looks into one that is out.
    """

    def __init__(self, root: Path, name: str, *, like_git: bool = False) -> None:
        self.name = name
        self._like_git = like_git
        self._root = root
        self._specs: dict[str, tuple[GitIgnoreSpec, Sequence[str]]] = {}
        self.reincludes = False  # some line takes files in

    def __bool__(self) -> bool:
        return bool(self._specs)

    def read(self, folder: str) -> None:
        """Read the file of a folder, when there is one; raises BadSource when it cannot be read."""
        try:
            data = (self._root / folder / self.name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise BadSource(f"{self._root / folder / self.name} cannot be read: {error.strerror}") from None
        text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        self.add(folder, [line.removesuffix("\r") for line in text.split("\n")])

    def add(self, folder: str, lines: Sequence[str]) -> None:
        """Take lines as if they stood in a file of that folder."""
        from pathspec import GitIgnoreSpec

        try:
            spec = GitIgnoreSpec.from_lines(lines)
        except ValueError as error:  # git passes over such a line; here it is reported
            raise BadSource(
                f"{self._root / folder / self.name} has a line that is not a valid pattern: {error}"
            ) from None
        self._specs[folder] = spec, lines
        self.reincludes = self.reincludes or any(line.startswith("!") for line in lines)

    def excludes(self, path: str) -> bool | None:
        """Return True for out, False for an explicit in, None when no line speaks of the path (`dir/` for a folder)."""
        match = self._find(path)
        return match[0] if match else None

    def line(self, path: str) -> str:
        """Return the line that decides, as `sub/.gitignore:3: *.csv`, or an empty string."""
        match = self._find(path)
        if not match:
            return ""
        _, folder, index = match
        return f"{folder}{'/' if folder else ''}{self.name}:{index + 1}: {self._specs[folder][1][index]}"

    def _find(self, path: str) -> tuple[bool, str, int] | None:
        if not self._specs:
            return None
        folder = path.rstrip("/")
        while folder:
            folder = folder.rpartition("/")[0]
            if folder in self._specs:
                match = self._last(self._specs[folder][0], path[len(folder) + 1 if folder else 0 :])
                if match:
                    return match[0], folder, match[1]
        return None

    def _last(self, spec: GitIgnoreSpec, path: str) -> tuple[bool, int] | None:
        if not self._like_git:
            result = spec.check_file(path)
            return None if result.include is None or result.index is None else (result.include, result.index)
        for index in range(len(spec.patterns) - 1, -1, -1):
            pattern = spec.patterns[index]
            if pattern.include is not None and pattern.regex and _is_meant(pattern.regex, path):
                return bool(pattern.include), index
        return None


def _is_meant(regex: re.Pattern[str], path: str) -> bool:
    """Return whether a line speaks of this very path, not only of a folder above it or of what is in it."""
    for match in regex.finditer(path):
        end = match.end("ps_d") if "ps_d" in regex.groupindex else -1  # pathspec's mark: the slash behind a folder
        if end == len(path) or (end == -1 and regex.search(path.rstrip("/"))):
            return True
    return False
