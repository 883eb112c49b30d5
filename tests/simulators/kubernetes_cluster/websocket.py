"""The server's side of a websocket: the handshake and the frames of RFC 6455, as the API server has them.

Only the standard library, and none of the client's code: the two check each other.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedIOBase

from cloudtrain.simulators.http import Request, Response
from tests.simulators.kubernetes_cluster.objects import StatusError

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_BINARY, CLOSE, _PING, _PONG = 2, 8, 9, 10


def upgrade(request: Request, protocol: str, serve: Callable[[Frames], None]) -> Response:
    """Return the response that turns a connection into a websocket, on which `serve` is called; raises StatusError."""
    headers = request.headers
    if headers.get("upgrade", "").lower() != "websocket" or "sec-websocket-key" not in headers:
        raise StatusError(400, "Upgrade request required")
    offered = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",")]
    if protocol not in offered:
        raise StatusError(403, f"unable to upgrade: unable to negotiate protocol: client supports {offered}")
    digest = hashlib.sha1(headers["sec-websocket-key"].encode() + _GUID, usedforsecurity=False).digest()
    answer = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": base64.b64encode(digest).decode(),
        "Sec-WebSocket-Protocol": protocol,
    }
    return Response(None, 101, answer, lambda connection, read: serve(Frames(connection, read)))


class Frames:
    """The server's side of a websocket: messages in, binary messages out."""

    def __init__(self, connection: socket.socket, read: BufferedIOBase) -> None:
        self._connection, self._read, self._lock = connection, read, threading.Lock()

    def send(self, data: bytes, opcode: int = _BINARY) -> None:
        """Send one message; raises OSError when the client has gone."""
        size = len(data)
        head = bytes([0x80 | opcode])
        if size < 126:
            head += bytes([size])
        elif size < 1 << 16:
            head += b"\x7e" + struct.pack(">H", size)
        else:
            head += b"\x7f" + struct.pack(">Q", size)
        with self._lock:
            self._connection.sendall(head + data)

    def messages(self) -> Iterator[bytes]:
        """Yield messages until the client closes the connection, or is gone."""
        parts = b""
        while True:
            try:
                head = self._read.read(2)
            except ConnectionError:  # it was killed with data that it had not read
                return
            if len(head) < 2:
                return
            size = head[1] & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self._read.read(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._read.read(8))
            mask = self._read.read(4)  # a client's frames have one
            masked = self._read.read(size)
            repeated = (mask * (size // 4 + 1))[:size]
            data = (int.from_bytes(masked, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
            opcode = head[0] & 0x0F
            if opcode == CLOSE:
                with suppress(OSError):
                    self.send(data[:2], CLOSE)
                return
            if opcode == _PING:
                self.send(data, _PONG)
            elif opcode != _PONG:
                parts += data
                if head[0] & 0x80:
                    yield parts
                    parts = b""

    def close(self) -> None:
        """Send that no more comes, and wait for the client's answer."""
        with suppress(OSError):
            self.send(struct.pack(">H", 1000), CLOSE)
            self._connection.settimeout(10)
            for _ in self.messages():
                pass
