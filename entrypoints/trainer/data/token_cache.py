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
from .row_copies import NEVER, default_folder
from .samples import token_groups
from .tokenizer import fingerprint

PIECE = 4 << 20  # characters of text that one process takes at a time; a long text is one piece
SMALLEST = 32 << 20  # bytes of text that are kept where no folder is named
_FORMAT = "1 int32"

Tokens = np.ndarray[Any, np.dtype[np.int32]]
Arrays = tuple[Tokens, ...]
Texts = Callable[[], Iterable[str]]


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


def packed_tokens(texts: Texts, tokenizer: Any, folder: str = "") -> tuple[Tokens, str]:
    """Return the tokens of all texts in one stream, and where they are kept, "" if in memory.

    Args:
        texts: gives the texts, each time from the first one on.
        tokenizer: a tokenizer of transformers.
        folder: where tokens are kept; "" is the user's cache, for large texts alone, and `none` keeps nothing.
    """
    if folder == NEVER or getattr(tokenizer, "backend_tokenizer", None) is None:
        return in_memory(texts(), tokenizer), ""
    digest, size = digest_of(texts(), tokenizer)
    work = Work(
        ("tokens",), lambda: _groups(texts()), lambda group: ((tokens,) for tokens in token_groups(group, tokenizer))
    )
    arrays, place = kept_arrays(work, digest, size, folder)
    return arrays[0] if arrays else in_memory(texts(), tokenizer), place


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


def in_memory(texts: Iterable[str], tokenizer: Any, pieces: int = 256) -> Tokens:
    """Return the tokens of all texts in one stream, an end-of-text token behind each."""
    parts = list(token_groups(texts, tokenizer, pieces))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def digest_of(texts: Iterable[str], tokenizer: Any) -> tuple[str, int]:
    """Return what tells these texts and this tokenizer from all others, and the bytes of the texts."""
    import tokenizers

    whole, size = hashlib.sha256(), 0
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        whole.update(len(raw).to_bytes(8, "big") + raw)
        size += len(raw)
    made_by = [_FORMAT, tokenizers.__version__, fingerprint(tokenizer), tokenizer.eos_token_id, whole.hexdigest()]
    return hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:32], size


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


def _groups(texts: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """Yield the texts in groups of `PIECE` characters, the last text whole, and the bytes of each group."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= PIECE:
            yield group, _bytes(group)
            group, size = [], 0
    if group:
        yield group, _bytes(group)


def _bytes(group: list[str]) -> int:
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in group)


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
