"""Keep the tokens of a text on disk, memory-mapped, and find them again by the digest of the text and the tokenizer.

The processes of a machine tokenize together, each the pieces of the text that no other has taken, and then read the same
pages. Pieces that are done stay when a start is interrupted. A file is whole once its index is there, and is checked
against it before it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .progress import Progress
from .row_table import default_folder

PIECE = 4 << 20  # characters of text that one process takes at a time; a long text is one piece
SMALLEST = 32 << 20  # bytes of text that are kept where no folder is named

Tokens = np.ndarray[Any, np.dtype[np.int32]]
Arrays = tuple[Tokens, ...]


@dataclass(frozen=True)
class Work:
    """What is tokenized: pieces of which each process takes those that no other has taken.

    Args:
        names: of the flat arrays that it makes, a file each.
        pieces: gives (what is tokenized, its bytes of text) of each piece, each time from the first one on.
        encode: the arrays of one piece, a part of each at a time.
    """

    names: tuple[str, ...]
    pieces: Callable[[], Iterable[tuple[Any, int]]]
    encode: Callable[[Any], Iterable[Arrays]]


def kept_arrays(work: Work, digest: str, size: int, folder: str) -> tuple[Arrays | None, str]:
    """Return the memory-mapped arrays with a digest, made first where they are not there, and the folder they are in.

    None where they are to be in memory: for small texts, and with the reason where they cannot be kept.
    """
    if not folder and size < SMALLEST:
        return None, ""
    base = Path(folder or default_folder())
    try:
        return _kept(base / digest, work, Progress("tokenizing", size)), str(base / digest)
    except OSError as error:  # a full disk, a folder that is not writable, a file system without locks
        return None, f"memory only: {base}: {error.strerror or error}"


def _kept(folder: Path, work: Work, progress: Progress) -> Arrays:
    """Return the arrays that are in a folder, written there first where they are not; raises OSError."""
    pieces = folder.with_suffix(".pieces")
    if (arrays := _read(folder, work.names)) is not None:
        return arrays
    pieces.mkdir(parents=True, exist_ok=True)
    for number, (piece, size) in enumerate(work.pieces()):
        if not _piece(pieces, number, piece, work, wait=False):
            break
        progress.add(size)
    with _locked(folder.with_suffix(".lock")):
        arrays = _read(folder, work.names)
        if arrays is None:
            pieces.mkdir(exist_ok=True)
            _join(folder, pieces, work)
            shutil.rmtree(pieces, ignore_errors=True)
            arrays = _read(folder, work.names)
    progress.end()
    if arrays is None:
        raise OSError(f"{folder} was removed, or it changes while it is read")
    return arrays


def _piece(folder: Path, number: int, piece: Any, work: Work, wait: bool) -> bool:
    """Write the arrays of one piece, unless they are there, or another process writes them and `wait` is off.

    Returns False when the folder is gone: all pieces were joined by another process.
    """
    files = [folder / f"{number:06d}.{name}" for name in work.names]
    if files[-1].exists():
        return True
    try:
        with open(folder / f"{number:06d}.lock", "w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return True
            if files[-1].exists():
                return True
            with ExitStack() as opened:
                outs = [opened.enter_context(open(f"{file}.new", "wb")) for file in files]
                for arrays in work.encode(piece):
                    for out, array in zip(outs, arrays, strict=True):
                        out.write(array)
                for out in outs:
                    out.flush()
                    os.fsync(out.fileno())
            for file in files:  # the last one says that the piece is whole
                os.replace(f"{file}.new", file)
    except FileNotFoundError:
        if folder.exists():
            raise
        return False
    return True


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _read(folder: Path, names: tuple[str, ...]) -> Arrays | None:
    """Return the arrays in a folder, None where there are none or where they are damaged."""
    arrays, whole = list[Tokens](), hashlib.sha256()
    try:
        index = json.loads((folder / "index.json").read_text())
        for name in names:
            file, count = folder / f"{name}.bin", index[name]
            if file.stat().st_size != count * 4:
                return None
            arrays.append(np.memmap(file, np.int32, "r") if count else np.zeros(0, np.int32))
            whole.update(arrays[-1])
        return tuple(arrays) if whole.hexdigest() == index["sha256"] else None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def _join(folder: Path, pieces: Path, work: Work) -> None:
    """Join all pieces in a folder, which has its name once it is whole; those that are still missing are tokenized here."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        content, index = hashlib.sha256(), dict[str, Any]()
        numbers = 0
        for numbers, (piece, _) in enumerate(work.pieces(), 1):
            _piece(pieces, numbers - 1, piece, work, wait=True)
        for name in work.names:
            size = 0
            with open(partial / f"{name}.bin", "wb") as stream:
                for number in range(numbers):
                    with open(pieces / f"{number:06d}.{name}", "rb") as part:
                        while block := part.read(1 << 20):
                            stream.write(block)
                            content.update(block)
                            size += len(block)
                stream.flush()
                os.fsync(stream.fileno())
            index[name] = size // 4
        (partial / "index.json").write_text(json.dumps(index | {"sha256": content.hexdigest()}))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
