"""Files between this machine and others: a bundle there once, a folder of results back."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.errors import BackendError
from cloudtrain.nodes import ssh
from cloudtrain.nodes.rpc import Asked
from cloudtrain.source.archive import leads_out

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cloudtrain.nodes.rpc import Answer
    from cloudtrain.source.bundle import Bundle

PIECE = 4 << 20  # bytes in one message
WINDOW = 8  # messages on their way at once
SEND_S = 600.0  # for one message: lines may be slow


def send(there: Asked, root: str, bundle: Bundle) -> None:
    """Put a bundle below a machine's `root`/src, under its digest; blocking. Raises BackendError."""
    waiting: deque[Future[Answer]] = deque()
    with open(bundle.path, "rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset < size:
            piece = file.read(PIECE)
            last = offset + len(piece) >= size
            waiting.append(
                there.begin("put", piece, timeout_s=SEND_S, root=root, sha256=bundle.sha256, offset=offset, last=last)
            )
            offset += len(piece)
            if len(waiting) >= WINDOW:
                ssh.result(waiting.popleft())
    for future in waiting:
        ssh.result(future)


def bring(there: Asked, folder: str, into: Path) -> None:
    """Copy a machine's folder, links as links; blocking. What is here already, of that size and time, is not read again.

    Raises BackendError, also for a name or link that would lead out of `into`.
    """
    found = there.ask("walk", path=folder, timeout_s=SEND_S).value
    links = {path: target for path, _, _, _, target in found if target}
    for path in (path for path, *_ in found):
        if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise BackendError(f"{there.label} offers a file {path!r}, which is refused")
    files = [(path, size, mtime, mode) for path, size, mtime, mode, target in found if not target]
    if files or links:
        into.mkdir(parents=True, exist_ok=True)
    wanted = [file for file in files if not _is_here(into / file[0], file[1], file[2])]
    answers = _read(there, folder, [(path, size) for path, size, _, _ in wanted])
    for path, size, mtime, mode in wanted:
        place = into / path
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_name(f".{place.name}.{os.getpid()}")
        with open(half, "wb") as file:
            while (left := size - file.tell()) > 0:
                piece = next(answers)
                if not piece:
                    break  # it became shorter meanwhile
                file.write(piece[:left])
        half.chmod(mode)
        os.utime(half, ns=(mtime, mtime))
        half.replace(place)
    for path, target in links.items():
        if leads_out(path, links):
            continue  # it means something on that machine only
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).unlink(missing_ok=True)
        (into / path).symlink_to(target)


def _is_here(place: Path, size: int, mtime_ns: int) -> bool:
    try:
        seen = place.stat()
    except OSError:
        return False
    return (seen.st_size, seen.st_mtime_ns) == (size, mtime_ns)


def _read(there: Asked, folder: str, files: list[tuple[str, int]]) -> Iterator[bytes]:
    """Yield files in order, piece by piece, several on their way at once."""
    waiting: deque[Future[Answer]] = deque()
    for path, size in files:
        for offset in range(0, size, PIECE):
            waiting.append(there.begin("read", timeout_s=SEND_S, path=f"{folder}/{path}", offset=offset, limit=PIECE))
            if len(waiting) >= WINDOW:
                yield ssh.result(waiting.popleft()).data
    while waiting:
        yield ssh.result(waiting.popleft()).data
