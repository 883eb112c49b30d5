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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .progress import Progress
from .samples import token_groups
from .tokenizer import fingerprint

PIECE = 4 << 20  # characters of text that one process takes at a time; a long text is one piece
SMALLEST = 32 << 20  # bytes of text that are kept where no folder is named
NEVER = "none"
_FORMAT = "1 int32"

Tokens = np.ndarray[Any, np.dtype[np.int32]]
Texts = Callable[[], Iterable[str]]


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
    if not folder and size < SMALLEST:
        return in_memory(texts(), tokenizer), ""
    base = Path(folder or default_folder())
    try:
        return _kept(base / digest, texts, tokenizer, Progress("tokenizing", size)), str(base / digest)
    except OSError as error:  # a full disk, a folder that is not writable, a file system without locks
        return in_memory(texts(), tokenizer), f"memory only: {base}: {error.strerror or error}"


def default_folder() -> str:
    """Return the folder of this user's cache."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cloudtrain", "tokens")


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


def _kept(folder: Path, texts: Texts, tokenizer: Any, progress: Progress) -> Tokens:
    """Return the tokens that are in a folder, written there first where they are not; raises OSError."""
    pieces = folder.with_suffix(".pieces")
    if (tokens := _read(folder)) is not None:
        return tokens
    pieces.mkdir(parents=True, exist_ok=True)
    for number, group in enumerate(_groups(texts())):
        if not _piece(pieces, number, group, tokenizer, wait=False):
            break
        progress.add(group)
    with _locked(folder.with_suffix(".lock")):
        tokens = _read(folder)
        if tokens is None:
            pieces.mkdir(exist_ok=True)
            _join(folder, pieces, texts, tokenizer)
            shutil.rmtree(pieces, ignore_errors=True)
            tokens = _read(folder)
    progress.end()
    if tokens is None:
        raise OSError(f"{folder} was removed, or it changes while it is read")
    return tokens


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in groups of `PIECE` characters, the last text whole."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _piece(folder: Path, number: int, group: list[str], tokenizer: Any, wait: bool) -> bool:
    """Write the tokens of one piece, unless they are there, or another process writes them and `wait` is off.

    Returns False when the folder is gone: all pieces were joined by another process.
    """
    file, lock = folder / f"{number:06d}.bin", folder / f"{number:06d}.lock"
    if file.exists():
        return True
    try:
        with open(lock, "w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return True
            if file.exists():
                return True
            with open(folder / f"{number:06d}.new", "wb") as out:
                for tokens in token_groups(group, tokenizer):
                    out.write(tokens)
                out.flush()
                os.fsync(out.fileno())
            os.replace(folder / f"{number:06d}.new", file)
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


def _read(folder: Path) -> Tokens | None:
    """Return the tokens in a folder, None where there are none or where they are damaged."""
    try:
        index = json.loads((folder / "index.json").read_text())
        count, expected = index["tokens"], index["sha256"]
        if (folder / "tokens.bin").stat().st_size != count * 4:
            return None
        tokens: Tokens = np.memmap(folder / "tokens.bin", np.int32, "r") if count else np.zeros(0, np.int32)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return tokens if hashlib.sha256(tokens).hexdigest() == expected else None


def _join(folder: Path, pieces: Path, texts: Texts, tokenizer: Any) -> None:
    """Join all pieces in a folder, which has its name once it is whole; those that are still missing are tokenized here."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        content, size = hashlib.sha256(), 0
        with open(partial / "tokens.bin", "wb") as stream:
            for number, group in enumerate(_groups(texts())):
                _piece(pieces, number, group, tokenizer, wait=True)
                with open(pieces / f"{number:06d}.bin", "rb") as piece:
                    while block := piece.read(1 << 20):
                        stream.write(block)
                        content.update(block)
                        size += len(block)
            stream.flush()
            os.fsync(stream.fileno())
        (partial / "index.json").write_text(json.dumps({"tokens": size // 4, "sha256": content.hexdigest()}))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
