"""Bring a bundle to one machine or to those of a job, download a folder of results."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
SHARED_BYTES = 1 << 20  # a smaller bundle is uploaded to each machine
SLOWEST = 1e6  # bytes per second from machine to machine: a slower transfer is ended


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


class Receiver(Protocol):
    """A machine of a job."""

    @property
    def internal(self) -> str:
        """The address by which the others see it."""
        ...

    @property
    def agent(self) -> Agent: ...

    @property
    def courier(self) -> Agent:
        """Another process there: a transfer may take long."""
        ...


class Distribution:
    """Brings a bundle to the machines of a job: one upload, then from machine to machine, from twice as many each time.

    Args:
        root: folder of cloudtrain on the machines.
        uploads: whether no machine has the bundle yet.
        host_to_host: whether machines may send it to each other; otherwise each has an upload of its own.
    """

    def __init__(self, root: str, bundle: Bundle, uploads: bool, host_to_host: bool) -> None:
        self._root, self._bundle = root, bundle
        self._arguments: dict[str, Any] = {"root": root, "sha256": bundle.sha256}
        self._size = bundle.path.stat().st_size
        self._sources: SimpleQueue[Receiver | None] = SimpleQueue()  # None: an upload from here
        self._failures: list[str] = []
        self._identity = _make_identity() if host_to_host and self._size >= SHARED_BYTES else ""
        if uploads:
            self._sources.put(None)

    def bring(self, machine: Receiver, present: bool, extract: Callable[[], object]) -> None:
        """Bring the bundle to a machine and extract it, which checks its digest; blocking. Raises BackendError.

        Each machine has a thread of its own; those where it is `present` are called first.
        """
        if not self._identity:
            self._upload(machine, present, extract)
            return
        source = None if present else self._sources.get()
        next_sources: list[Receiver | None] = [source]
        try:
            if source is not None and self._pass_on(source, machine, extract):
                next_sources = [source, machine]
            else:
                self._upload(machine, present, extract)
                next_sources = [machine] if source is None else [machine, None]  # the source may be behind a firewall
        finally:
            for each in next_sources:
                self._sources.put(each)

    def report(self) -> None:
        """Log in one line which machines did not get the bundle from another one."""
        if self._failures:
            text = "the source went from here to %d machines that did not get it from another one: %s"
            logging.getLogger(__name__).warning(text, len(self._failures), self._failures[0])

    def _upload(self, machine: Receiver, present: bool, extract: Callable[[], object]) -> None:
        if not present:
            send_bundle(machine.agent, self._root, self._bundle)
        try:
            extract()
        except BackendError as error:
            if isinstance(error, Unreachable) or machine.agent.ask("arrived", **self._arguments, size=self._size).value:
                raise
            send_bundle(machine.agent, self._root, self._bundle)  # what was there was damaged, and is deleted
            extract()

    def _pass_on(self, source: Receiver, machine: Receiver, extract: Callable[[], object]) -> bool:
        """Let a machine fetch the bundle from another one and extract it; return whether it has. Blocking."""
        limit_s = SEND_S + self._size / SLOWEST
        given: dict[str, Any] = {**self._arguments, "identity": self._identity}
        try:
            port = given["port"] = source.courier.ask("listen", host=source.internal).value
            if problem := machine.courier.ask("reach", host=source.internal, port=port).value:
                source.courier.ask("close", port=port)
                raise BackendError(problem)
            sending = source.courier.begin("give", timeout_s=limit_s, **given)
            try:
                machine.courier.ask("fetch", timeout_s=limit_s, host=source.internal, size=self._size, **given)
            except BackendError:
                sending.cancel()  # it would be sent again over a new connection
                raise
            event_loop.wait_result(sending)
            extract()
        except BackendError as error:
            self._failures.append(f"{source.internal} to {machine.internal}: {error.message}")
            return False
        return True


def _make_identity() -> str:
    """Return a new certificate and its key (PEM), the one secret that the machines of a distribution share."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cloudtrain")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(datetime(2000, 1, 1)).not_valid_after(datetime(2100, 1, 1))  # whatever a clock shows
    ).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return (certificate.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)).decode()


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
