"""The lock below which the history's file is opened, created and replaced, and what tells one file from another."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudtrain.errors import StoreError


@contextmanager
def locked(path: Path, exclusive: bool, most_s: float) -> Iterator[None]:
    """Keep others from creating or replacing the history, which SQLite does not guard; `exclusive` from opening it too.

    Waits, but not for ever: the holder may be a stopped process. Raises StoreError then.
    """
    deadline = time.monotonic() + most_s
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreError(f"the history cannot be used: {path} is locked", "try again") from None
                time.sleep(0.005)
        yield


def identity(path: Path, *, content: bool = False) -> object:
    """Return what tells a file from one that has replaced it, with `content` from a changed one too; None without one."""
    try:
        found = path.stat()
        if not content:
            return found.st_dev, found.st_ino
        files = [Path(f"{path}{suffix}") for suffix in ("", "-wal")]
        return [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
    except OSError:
        return None
