"""The private socket of a home's watcher: commands of the same user send it one JSON message and get one back.

Messages hold credentials. The socket is in a folder that only its user can enter; both sides check the other's user.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LONGEST = 100  # bytes of a path in sockaddr_un, which has 104 or 108 (unix(7))
MOST_BYTES = 64 << 20  # of one message; an environment is at most 2 MiB (execve(2)), an answer has those of many runs
WAIT_S = 10.0  # for the next piece of a message
Message = dict[str, Any]


class Mailbox:
    """The watcher's side: `handle` is called with each message, in a thread of its own, and returns the answer."""

    def __init__(self, folder: Path, name: str, handle: Callable[[Message], Message]) -> None:
        self._handle = handle
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            with _short(self.path) as address:
                self._socket.bind(address)
        except OSError:  # a file system without sockets, or a path too long where there is no /proc
            self.path = Path(tempfile.mkdtemp(prefix="cloudtrain-")) / name
            self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(256)
        threading.Thread(target=self._serve, name="mailbox", daemon=True).start()

    def close(self) -> None:
        """Accept nothing more; messages that are being handled are answered."""
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            connection.settimeout(WAIT_S)
            if _is_mine(connection):
                answer = self._handle(_receive(connection))
                connection.sendall(json.dumps(answer).encode() + b"\n")


def call(path: str, message: Message, timeout_s: float = WAIT_S) -> Message | None:
    """Send a message to a watcher and return its answer; None where nobody answers. Blocking."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError, ValueError):
        connection.settimeout(timeout_s)
        with _short(Path(path)) as address:
            connection.connect(address)
        if _is_mine(connection):
            connection.sendall(json.dumps(message).encode() + b"\n")
            return _receive(connection)
    return None


def _receive(connection: socket.socket) -> Message:
    """Read one line of JSON; raises OSError, ValueError."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece or len(data) > MOST_BYTES:
            raise ValueError("the message has no end")
        data += piece
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("the message is not a JSON object")
    return message


def _is_mine(connection: socket.socket) -> bool:
    """Return whether the other side is a process of this user; elsewhere than on Linux the folder's mode must do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(user == os.getuid())


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of the path that fits into an address."""
    if len(os.fsencode(path)) <= LONGEST or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
