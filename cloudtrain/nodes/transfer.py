"""Upload a bundle to a machine, download a folder of results from it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.errors import BackendError
from cloudtrain.nodes import event_loop
from cloudtrain.nodes.rpc import Agent
from cloudtrain.source.archive import leads_out

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cloudtrain.nodes.rpc import Answer
    from cloudtrain.source.bundle import Bundle

PIECE_BYTES = 4 << 20  # bytes in one message
WINDOW = 8  # messages in flight at once
SEND_S = 600.0  # timeout of one message: connections may be slow


def send_bundle(agent: Agent, root: str, bundle: Bundle) -> None:
    """Upload a bundle to a machine's `root`/src, under its digest; blocking. Raises BackendError."""
    waiting: deque[Future[Answer]] = deque()
    with open(bundle.path, "rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset < size:
            piece = file.read(PIECE_BYTES)
            last = offset + len(piece) >= size
            waiting.append(
                agent.begin("put", piece, timeout_s=SEND_S, root=root, sha256=bundle.sha256, offset=offset, last=last)
            )
            offset += len(piece)
            if len(waiting) >= WINDOW:
                event_loop.wait_result(waiting.popleft())
    for future in waiting:
        event_loop.wait_result(future)


def download_folder(agent: Agent, folder: str, into: Path) -> None:
    """Download a machine's folder, links as links; blocking. Files with the same size and time are skipped.

    Raises BackendError, also for a file name that would lead out of `into`.
    """
    entries = agent.ask("walk", path=folder, timeout_s=SEND_S).value
    links = {path: target for path, _, _, _, target in entries if target}
    for path in (path for path, *_ in entries):
        if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise BackendError(f"{agent.label} offers a file {path!r}, which is refused")
    files = [(path, size, mtime, mode) for path, size, mtime, mode, target in entries if not target]
    if files or links:
        into.mkdir(parents=True, exist_ok=True)
    wanted = [file for file in files if not _is_unchanged(into / file[0], file[1], file[2])]
    answers = _read_files(agent, folder, [(path, size) for path, size, _, _ in wanted])
    for path, size, mtime, mode in wanted:
        local_path = into / path
        local_path.parent.mkdir(parents=True, exist_ok=True)
        partial = local_path.with_name(f".{local_path.name}.{os.getpid()}")
        with open(partial, "wb") as file:
            while (missing := size - file.tell()) > 0:
                piece = next(answers)
                if not piece:
                    break  # it became shorter meanwhile
                file.write(piece[:missing])
        partial.chmod(mode)
        os.utime(partial, ns=(mtime, mtime))
        partial.replace(local_path)
    for path, target in links.items():
        if leads_out(path, links):
            continue  # it points outside the folder, to a path on that machine
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).unlink(missing_ok=True)
        (into / path).symlink_to(target)


def _is_unchanged(path: Path, size: int, mtime_ns: int) -> bool:
    try:
        info = path.stat()
    except OSError:
        return False
    return (info.st_size, info.st_mtime_ns) == (size, mtime_ns)


def _read_files(agent: Agent, folder: str, files: list[tuple[str, int]]) -> Iterator[bytes]:
    """Yield the files' bytes in order, in pieces, with several requests in flight."""
    waiting: deque[Future[Answer]] = deque()
    for path, size in files:
        for offset in range(0, size, PIECE_BYTES):
            waiting.append(
                agent.begin("read", timeout_s=SEND_S, path=f"{folder}/{path}", offset=offset, limit=PIECE_BYTES)
            )
            if len(waiting) >= WINDOW:
                yield event_loop.wait_result(waiting.popleft()).data
    while waiting:
        yield event_loop.wait_result(waiting.popleft()).data
