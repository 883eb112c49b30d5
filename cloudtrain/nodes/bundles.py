"""A machine's bundles: store the pieces of an upload, unpack, hand one to another machine. Sent to nodes as text, like agent.py.

From machine to machine a bundle goes over TLS 1.3. Both ends show the one certificate that the client made for this job, and
accept no other.

    <root>/src/<sha256>.tar.gz     a bundle, by the digest of its tar
    <root>/src/.<sha256>.<size>    what has arrived of it: the next upload continues there
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloudtrain.nodes.files import AnyPath, expand_path, make_folders, restrict

PIECE_BYTES = 1 << 20  # of what another machine sends
CONNECT_S = 5.0  # timeout of a connection between machines
ACCEPT_S = 30.0  # for so long a machine waits for the other one to connect
STALL_S = 30.0  # timeout of a transfer of which nothing arrives
_LISTENING: dict[int, Any] = {}  # port -> socket


def _paths(root: AnyPath, sha256: str, size: int) -> tuple[Path, Path]:
    folder = expand_path(root) / "src"
    return folder / f"{sha256}.tar.gz", folder / f".{sha256}.{size}"


def arrived(root: AnyPath, sha256: str, size: int) -> int:
    """Return how many bytes of a bundle of `size` bytes are here; less than `size` where it is not complete."""
    bundle, partial = _paths(root, sha256, size)
    if bundle.exists():
        return size
    try:
        return max(min(partial.stat().st_size, size - 1), 0)
    except FileNotFoundError:
        return 0


def store_piece(root: AnyPath, sha256: str, offset: int, size: int, given: bytes = b"") -> None:
    """Write a piece of a bundle of `size` bytes; the last one moves it to its digest's name.

    Several uploads may run at once: they write the same bytes. Raises OSError if the disk is full.
    """
    bundle, partial = _paths(root, sha256, size)
    make_folders(bundle.parent)
    if bundle.exists():
        return  # another upload was first
    try:
        with open(os.open(partial, os.O_WRONLY | (0 if offset else os.O_CREAT), 0o600), "wb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(file.fileno()), partial.stat()) or offset > file.seek(0, os.SEEK_END):
                raise FileNotFoundError(errno.ENOENT, "what had arrived of the bundle is gone")
            file.seek(offset)
            file.write(given)
            file.flush()
            if offset + len(given) >= size:
                partial.replace(bundle)
    except FileNotFoundError:
        if not bundle.exists():  # another upload was first
            raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def extract_bundle(root: AnyPath, sha256: str, into: AnyPath, mode: int = 0o700) -> None:
    """Unpack an uploaded bundle into a folder, all or nothing; does nothing if the folder exists.

    `mode` is that of its folders, and its files have no more.

    Raises ValueError, and deletes the bundle, if its digest is wrong; OSError if the disk is full.
    """
    import hashlib

    from cloudtrain.errors import StoreError
    from cloudtrain.source import archive  # here: most operations do not need it

    into, bundle = expand_path(into), expand_path(root) / "src" / f"{sha256}.tar.gz"
    if into.exists():
        return
    partial = into.with_name(f".{into.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    make_folders(partial, mode)
    try:
        digest = hashlib.sha256()
        try:
            with open(bundle, "rb", buffering=0) as stream:
                archive.extract(stream, partial, digest.update)
            intact = digest.hexdigest() == sha256
        except StoreError:
            intact = False
        if not intact:
            bundle.unlink()
            raise ValueError("what arrived is not the bundle that was sent")
        restrict(partial, mode)
        try:
            partial.rename(into)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# -- from machine to machine ------------------------------------------------------------------------------------------------


def listen_on(host: str) -> int:
    """Listen on a free port of an address until this agent ends or closes it, and return the port; raises OSError."""
    import socket  # here: planning for `local` imports this file and needs no network

    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    server.bind(address)
    server.listen(128)
    port = int(server.getsockname()[1])
    _LISTENING[port] = server
    return port


def close_port(port: int) -> None:
    """Stop to listen on a port of `listen_on`."""
    _LISTENING.pop(port).close()


def check_connection(host: str, port: int, wait_s: float = CONNECT_S) -> str | None:
    """Return why a connection to an address fails, or None if it succeeds."""
    import socket

    try:
        socket.create_connection((host, port), timeout=wait_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def give_bundle(root: AnyPath, sha256: str, port: int, identity: str) -> int:
    """Send a bundle to the one machine that connects to a port of `listen_on` with the certificate, and close the port.

    Returns the bytes sent; blocking. Connections without the certificate get nothing. Raises OSError.
    """
    import ssl

    context = _tls(ssl.PROTOCOL_TLS_SERVER, identity)
    deadline = time.monotonic() + ACCEPT_S
    with _LISTENING.pop(port) as server, open(expand_path(root) / "src" / f"{sha256}.tar.gz", "rb") as file:
        while True:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            connection = server.accept()[0]
            connection.settimeout(CONNECT_S)
            try:
                secure = context.wrap_socket(connection, server_side=True)
            except OSError:  # of a stranger
                connection.close()
                continue
            with secure:
                secure.settimeout(STALL_S)
                offset = int.from_bytes(secure.makefile("rb").read(8), "big")
                return int(secure.sendfile(file, offset))


def fetch_bundle(root: AnyPath, sha256: str, size: int, host: str, port: int, identity: str) -> None:
    """Receive from another machine what is missing here of a bundle of `size` bytes; blocking. Raises OSError.

    What has arrived stays when the connection breaks.
    """
    import socket
    import ssl

    context = _tls(ssl.PROTOCOL_TLS_CLIENT, identity)
    offset = arrived(root, sha256, size)
    with socket.create_connection((host, port), timeout=CONNECT_S) as plain, context.wrap_socket(plain) as secure:
        secure.settimeout(STALL_S)
        secure.sendall(offset.to_bytes(8, "big"))
        stream = secure.makefile("rb")
        while offset < size:
            piece = stream.read(min(PIECE_BYTES, size - offset))
            if not piece:
                raise OSError(f"{host} ended the transfer")
            store_piece(root, sha256, offset, size, piece)
            offset += len(piece)


def _tls(side: int, identity: str) -> Any:
    """Return a context that shows the certificate of `identity` (PEM, with its key) and accepts that one alone."""
    import ssl

    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    with tempfile.NamedTemporaryFile("w") as file:  # only its user can read it
        file.write(identity)
        file.flush()
        context.load_cert_chain(file.name)
        context.load_verify_locations(file.name)
    return context
