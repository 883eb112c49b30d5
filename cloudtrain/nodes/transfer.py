"""Bring a bundle to a machine, download a folder of results."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.nodes import event_loop
from cloudtrain.nodes.agents import Agent
from cloudtrain.source.folder_writer import folder_writer, writing

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cloudtrain.nodes.agents import Answer
    from cloudtrain.source.bundle import Bundle

PIECE_BYTES = 4 << 20  # bytes in one message
WINDOW = 8  # messages in flight at once
SEND_S = 600.0  # timeout of one message: connections may be slow


def send_bundle(agent: Agent, root: str, bundle: Bundle) -> None:
    """Upload what is missing of a bundle to a machine's `root`/src, under its digest; blocking. Raises BackendError."""
    waiting: deque[Future[Answer]] = deque()
    with open(bundle.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        offset = file.seek(agent.ask("arrived", root=root, sha256=bundle.sha256, size=size).value)
        while offset < size:
            piece = file.read(PIECE_BYTES)
            waiting.append(
                agent.begin("put", piece, timeout_s=SEND_S, root=root, sha256=bundle.sha256, offset=offset, size=size)
            )
            offset += len(piece)
            if len(waiting) >= WINDOW:
                event_loop.wait_result(waiting.popleft())
    for future in waiting:
        event_loop.wait_result(future)


def bring_bundle(agent: Agent, root: str, bundle: Bundle, present: bool, extract: Callable[[], object]) -> None:
    """Upload a bundle to a machine unless it is `present`, and extract it, which checks its digest; blocking.

    Raises BackendError.
    """
    if not present:
        send_bundle(agent, root, bundle)
    try:
        extract()
    except BackendError as error:
        arguments: dict[str, Any] = {"root": root, "sha256": bundle.sha256, "size": bundle.path.stat().st_size}
        if isinstance(error, Unreachable) or agent.ask("arrived", **arguments).value:
            raise
        send_bundle(agent, root, bundle)  # what was there was damaged, and is deleted
        extract()


class Entry(NamedTuple):
    """A file or link below a folder of a machine."""

    path: str
    size: int
    mtime_ns: int
    mode: int
    target: str  # of a link; "" for a file


def download_folder(agent: Agent, folder: str, into: Path) -> None:
    """Download a machine's folder, links as links; blocking. Files with the same size and time are skipped.

    Raises BackendError, also for a file name that would lead out of `into`.
    """
    download_entries(agent, folder, into, [(entry, entry.path) for entry in list_entries(agent, folder)])


def list_entries(agent: Agent, folder: str) -> list[Entry]:
    """List the files and links below a machine's folder; raises BackendError for a name that would lead out of it."""
    entries = [Entry(*fields) for fields in agent.ask("walk", path=folder, timeout_s=SEND_S).value]
    for path, *_ in entries:
        if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise BackendError(f"{agent.label} has a file {path!r}, outside of the run's folder: nothing is copied")
    return entries


def download_entries(agent: Agent, folder: str, into: Path, placed: Sequence[tuple[Entry, str]]) -> None:
    """Download some of what `list_entries` returned, each to its name below `into`; blocking.

    Links that lead out of `into` are left out with a warning. Raises BackendError, DiskError.
    """
    if not placed:
        return
    with folder_writer(into) as writer:
        wanted = [
            (entry, name)
            for entry, name in placed
            if not entry.target and not writer.has(name, entry.size, entry.mtime_ns)
        ]
        answers = _read_files(agent, folder, [(entry.path, entry.size) for entry, _ in wanted])
        for entry, name in wanted:
            with writing(into / name), writer.write(name, entry.mode, entry.mtime_ns) as file:
                while (missing := entry.size - file.tell()) > 0:
                    piece = next(answers)
                    if not piece:
                        break  # it became shorter meanwhile
                    file.write(piece[:missing])
        for entry, name in placed:
            if entry.target:
                writer.link(name, entry.target)


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
