"""Rows of parquet and .json files: their texts are copied to disk, and memory does not grow with them.

Documents are read in the order of their hashes, and neither format gives a row without those before it. The processes of
a machine share the copies, and the last one that needs them deletes them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .row_files import Columns, Document, Rows, numbered_rows, rows_of

NEVER = "none"
_FOLDER = "rows"


def default_folder() -> str:
    """Return the folder of this user's cache."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cloudtrain", "tokens")


class Copies:
    """A folder of copies, which is there as long as a process has a row of it.

    Args:
        folder: The cache of tokens, in which the copies are; "" is the user's. `none`: a temporary folder of this process.
    """

    def __init__(self, folder: str = NEVER) -> None:
        self.base = "" if folder == NEVER else folder or default_folder()
        self._folder: Path | None = None

    def rows(self, file: Path, key: str, columns: Columns) -> Sequence[Document]:
        """Return the documents of a parquet or .json file; they are in memory where no copy can be written."""
        try:
            return CopiedRows(file, key, columns, self)
        except OSError as error:  # a full disk, a folder that is not writable, a file system without locks
            found = list(rows_of(file, key, columns))  # an error of the file itself is raised here
            place = self.base or tempfile.gettempdir()
            print(
                f"the rows of {file} are in memory: {place}: {error.strerror or error}. Rows of jsonl stay in their file"
            )
            return found

    @property
    def folder(self) -> Path:
        """The folder, made when it is first needed; raises OSError."""
        if self._folder is None:
            if self.base:
                self._folder = Path(self.base, _FOLDER)
                self._folder.mkdir(parents=True, exist_ok=True)
                weakref.finalize(self, _leave, _enter(self._folder), self._folder, os.getpid())
            else:
                self._folder = Path(tempfile.mkdtemp(prefix="cloudtrain-rows-"))
                weakref.finalize(self, _remove, self._folder, os.getpid())
        return self._folder


class CopiedRows(Rows):
    """The rows of a parquet or .json file, each by the place of its text in the copy."""

    def __init__(self, file: Path, key: str, columns: Columns, copies: Copies) -> None:
        super().__init__(key, columns, os.fspath(file))
        self.copies, self.places = copies, array("q", [0])  # where the text of each row begins, and the end of the last
        state = file.stat()
        source = [str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ino, key, repr(columns)]
        name = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:32]
        self.text, index = (copies.folder / f"{name}.{ending}" for ending in ("text", "index"))
        with _locked(copies.folder / f"{name}.lock"):
            if not index.exists():
                self._write(file, index)
        self._read_index(index)

    def _write(self, file: Path, index: Path) -> None:
        try:
            with open(self.text, "wb") as stream:
                for at, row in numbered_rows(file):
                    text = self.add(at, row).read().encode("utf-8", "surrogatepass")
                    stream.write(text)
                    self.places.append(self.places[-1] + len(text))
            with open(f"{index}.new", "wb") as stream:
                stream.write(json.dumps([len(self.lines), len(self.labels), self.names]).encode() + b"\n")
                for numbers in (self.lines, self.labels, self.places):
                    numbers.tofile(stream)
            os.replace(f"{index}.new", index)
        except BaseException:
            self.text.unlink(missing_ok=True)  # on a disk that may be full
            raise

    def _read_index(self, index: Path) -> None:
        with open(index, "rb") as stream:
            rows, labels, self.names = json.loads(stream.readline())
            self.lines, self.labels, self.places = (_numbers(stream, count) for count in (rows, labels, rows + 1))

    def _read(self, number: int, at: int) -> str:
        with open(self.text, "rb", buffering=0) as stream:
            begin, end = self.places[number], self.places[number + 1]
            return os.pread(stream.fileno(), end - begin, begin).decode("utf-8", "surrogatepass")


def _numbers(stream: IO[bytes], count: int) -> array[int]:
    numbers = array("q")
    numbers.fromfile(stream, count)
    return numbers


def _enter(folder: Path) -> IO[bytes]:
    """Return an open file that is locked, together with other processes; what a killed one left is deleted first."""
    stream = open(folder / "lock", "wb")  # noqa: SIM115, stays open with the lock
    _clear(stream, folder)
    fcntl.flock(stream, fcntl.LOCK_SH)
    return stream


def _leave(stream: IO[bytes], folder: Path, process: int) -> None:
    """Delete the copies unless another process has them open."""
    if os.getpid() == process:  # not in one that it has forked
        _clear(stream, folder)
    stream.close()


def _clear(stream: IO[bytes], folder: Path) -> None:
    with suppress(BlockingIOError):  # a process has copies
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for file in folder.glob("*.*"):
            file.unlink(missing_ok=True)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
