"""Files that appear whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cloudtrain.errors import StoreError


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name when the block ends well, and leaves nothing behind otherwise.

    Its folder is made; only the owner may read it. Raises StoreError when it cannot be written.
    """
    with temporary(path.parent, path.name) as (stream, name):
        yield stream
        with explained(path.parent):
            stream.close()
            name.replace(path)


@contextmanager
def temporary(folder: Path, name: str) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a file under a unique temporary name; it is deleted when the block ends unless it was renamed."""
    path = folder / f".{name}.{os.getpid()}-{time.perf_counter_ns():x}.tmp"
    try:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with open(path, "xb", opener=_private) as stream:
                yield stream, path
    finally:
        with suppress(OSError):
            path.unlink()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn the file system's complaints into one sentence."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}", "make room, or set CLOUDTRAIN_HOME") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
