"""A program in a pod over a websocket, as a kubelet runs it: frames of RFC 6455, channels of v5.channel.k8s.io.

Only the standard library, and none of the client's code: the two check each other.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from cloudtrain.simulators.http import Request, Response
from cloudtrain.simulators.kubernetes.objects import StatusError

PROTOCOL = "v5.channel.k8s.io"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10


def upgrade(request: Request, serve: Callable[[Frames], None]) -> Response:
    """Return the response that turns a connection into a websocket, on which `serve` is called; raises StatusError."""
    headers = request.headers
    if headers.get("upgrade", "").lower() != "websocket" or "sec-websocket-key" not in headers:
        raise StatusError(400, "Upgrade request required")
    offered = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",")]
    if PROTOCOL not in offered:
        raise StatusError(403, f"unable to upgrade: unable to negotiate protocol: client supports {offered}")
    digest = hashlib.sha1(headers["sec-websocket-key"].encode() + _GUID, usedforsecurity=False).digest()
    answer = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": base64.b64encode(digest).decode(),
        "Sec-WebSocket-Protocol": PROTOCOL,
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
            head = self._read.read(2)
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
            if opcode == _CLOSE:
                with suppress(OSError):
                    self.send(data[:2], _CLOSE)
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
            self.send(struct.pack(">H", 1000), _CLOSE)
            self._connection.settimeout(10)
            for _ in self.messages():
                pass


class Program:
    """A program of a container, whose streams are the channels of a websocket."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], folder: Path, streams: frozenset[str], frames: Frames
    ) -> None:
        self._frames, self._terminal = frames, "tty" in streams
        ours = theirs = -1
        if self._terminal:
            ours, theirs = pty.openpty()
        stdin: int = subprocess.PIPE if "stdin" in streams else subprocess.DEVNULL
        self._process = subprocess.Popen(
            list(argv),
            cwd=folder,
            env=dict(env),
            stdin=theirs if self._terminal else stdin,
            stdout=theirs if self._terminal else subprocess.PIPE,
            stderr=theirs if self._terminal else subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_own_terminal if self._terminal else None,
        )
        if self._terminal:
            os.close(theirs)
        self._pty = ours

    def serve(self) -> None:
        """Copy the streams until the program has ended, and send its status."""
        threading.Thread(target=self._receive, daemon=True).start()
        if self._terminal:
            readers = [threading.Thread(target=self._copy, args=(self._pty, 1), daemon=True)]
        else:
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            outputs = ((self._process.stdout, 1), (self._process.stderr, 2))
            readers = [threading.Thread(target=self._copy, args=(pipe.fileno(), n), daemon=True) for pipe, n in outputs]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        for reader in readers:
            reader.join(10)
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if code:
            number = str(code if code > 0 else 128 - code)
            status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
                      "message": f"command terminated with non-zero exit code: exit status {number}",
                      "details": {"causes": [{"reason": "ExitCode", "message": number}]}}  # fmt: skip
        with suppress(OSError):
            self._frames.send(b"\x03" + json.dumps(status).encode())
            self._frames.send(struct.pack(">H", 1000), _CLOSE)

    def _copy(self, descriptor: int, channel: int) -> None:
        with suppress(OSError):  # a terminal whose program has ended; a client that has gone
            while data := os.read(descriptor, 1 << 15):
                self._frames.send(bytes([channel]) + data)

    def _receive(self) -> None:
        stdin = self._process.stdin
        for message in self._frames.messages():
            with suppress(OSError, ValueError):
                if message[:1] == b"\x00":
                    target = self._pty if self._terminal else stdin.fileno() if stdin else -1
                    data = message[1:]
                    while data:
                        data = data[os.write(target, data) :]
                elif message == b"\xff\x00" and stdin:
                    stdin.close()
                elif message[:1] == b"\x04" and self._terminal:
                    size = json.loads(message[1:])
                    packed = struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
                    fcntl.ioctl(self._pty, termios.TIOCSWINSZ, packed)
        with suppress(OSError, ValueError, ProcessLookupError):  # the client has gone
            if stdin:
                stdin.close()
            if self._terminal:
                os.killpg(self._process.pid, signal.SIGHUP)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
