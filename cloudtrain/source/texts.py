"""The text of a source's files, read once for every note and check that looks at it, and the files that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from cloudtrain.errors import CloudtrainError
from cloudtrain.job.units import format_size
from cloudtrain.source.files import IGNORE_FILE, why
from cloudtrain.source.limits import MAX_FILE

SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".toml", ".json", ".cfg")
LONGEST = 1 << 20  # bytes of a file that are read
MOST_BYTES = 4 << 20  # of all files: every plan and submit waits for it
MOST = 3  # sentences on files that are not sent
LOOKED = 1000  # files of a folder whose size is looked at
_QUOTED = re.compile(r"""["'](?:\./)?([\w.][\w./ -]{1,199})["']""")


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
        is_module: whether it runs as `python -m` does.
    """

    def __init__(self, root: Path, names: Iterable[str], entrypoint: object = None) -> None:
        self.root, self.names = root, frozenset(names)
        self.entry = next((name for name in _script_paths(entrypoint) if name in self.names), "")
        self.is_module = isinstance(entrypoint, str) and entrypoint.startswith("-m ")
        self.complete = True
        self._cut = ""  # the file that `files` holds in part

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
                self._cut, data = name, data[:-1]
            left -= len(data)
            found[name] = data.decode("utf-8", "replace")
        return found

    def read(self, name: str) -> str:
        """Return the text of one packaged file, also of one that `files` leaves out or cuts; "" where it cannot be read."""
        if name in self.files and name != self._cut:
            return self.files[name]
        try:
            with (self.root / name).open("rb") as stream:
                return stream.read(LONGEST).decode("utf-8", "replace")
        except OSError:
            return ""

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


def mentions(texts: Texts, words: Iterable[str] = ()) -> list[str]:
    """Return sentences on files that the source's text or `words` name, and that are not among the packaged ones.

    `words` are arguments and the like that may name files too.
    """
    sentences: list[str] = []
    for path in dict.fromkeys([*words, *_quoted(texts)]):
        if len(sentences) < MOST and (sentence := explain(texts.root, texts.names, path)):
            sentences.append(sentence)
    return sentences


def explain(root: Path, sent: Collection[str], path: str) -> str:
    """Return why a path below the source is not sent, and what would send it; "" where it is sent, or not there."""
    plain = os.path.normpath(path) if path else ""
    outside = plain in ("", ".") or plain.startswith((".", "/", "~")) or "/." in plain
    if outside or plain in sent:
        return ""
    try:
        here = root / plain
        if not here.exists() or (here.is_dir() and not any(here.iterdir())):
            return ""
        if here.is_dir() and any(name.startswith(f"{plain}/") for name in sent):
            return ""
        inner = next((at for at in here.rglob("*") if at.is_file()), here) if here.is_dir() else here
        reason = why(root, str(inner.relative_to(root))).sentence.partition(" is not packaged: ")[2]
    except (OSError, ValueError, CloudtrainError):
        return ""
    if not reason:
        return ""
    size = _size(here)
    if size > MAX_FILE:
        return (
            f"{plain} is not sent: {reason}; it has {format_size(size)}, too much for a source: use inputs: in the job"
        )
    take_in = f"!{plain}/**" if here.is_dir() else f"!{plain}"
    return f"{plain} is not sent: {reason}; a line {take_in} in {IGNORE_FILE} sends it"


def _size(path: Path) -> int:
    """Return the bytes of a file, or of the largest file of a folder's first LOOKED; 0 where it cannot be read."""
    files = islice((at for at in path.rglob("*") if at.is_file()), LOOKED) if path.is_dir() else [path]
    try:
        return max((at.stat().st_size for at in files), default=0)
    except OSError:
        return 0


def _quoted(texts: Texts) -> Iterator[str]:
    """Yield what stands in quotes in the source's text and could be a file's name."""
    for text in texts.files.values():
        for match in _QUOTED.finditer(text):
            if "/" in match[1] or "." in match[1][1:]:
                yield match[1]
