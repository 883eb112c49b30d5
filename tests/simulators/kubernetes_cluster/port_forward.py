"""A connection to a port of a pod over a websocket, as a kubelet makes it: channels of v4.channel.k8s.io.

Channel 0 carries the data of the port, channel 1 an error. The first message of each is the port, 16 bits little-endian.
https://github.com/kubernetes/kubernetes, staging/src/k8s.io/kubelet/pkg/cri/streaming/portforward/websocket.go (2026-11-25)
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from tests.simulators.kubernetes_cluster.objects import StatusError
from tests.simulators.kubernetes_cluster.websocket import CLOSE, Frames

PROTOCOL = "v4.channel.k8s.io"


def parse_ports(values: list[str]) -> list[int]:
    """Return the ports of a request's query; raises StatusError."""
    words = [word for value in values for word in value.split(",")]
    if not words:
        raise StatusError(400, 'query parameter "ports" is required')
    for word in words:
        if not (word.isdecimal() and 0 < int(word) < 1 << 16):
            raise StatusError(400, f'unable to parse "{word}" as a port')
    return [int(word) for word in words]


def serve(frames: Frames, ports: list[int], pod: str) -> None:
    """Connect to ports of a pod, which is on this machine, and copy both ways until all of them are closed; blocking."""
    connections: dict[int, socket.socket] = {}
    for index, port in enumerate(ports):
        for channel in (2 * index, 2 * index + 1):
            frames.send(bytes([channel]) + struct.pack("<H", port))
        try:
            connections[2 * index] = socket.create_connection(("127.0.0.1", port), timeout=60)
            connections[2 * index].settimeout(None)
        except OSError as error:
            text = f"error forwarding port {port} to pod {pod}: failed to connect to localhost:{port}: {error.strerror}"
            frames.send(bytes([2 * index + 1]) + text.encode())
    copies = [threading.Thread(target=_copy, args=(frames, *item), daemon=True) for item in connections.items()]
    for copy in copies:
        copy.start()
    threading.Thread(target=_receive, args=(frames, connections), daemon=True).start()
    for copy in copies:
        copy.join()
    with suppress(OSError):
        frames.send(struct.pack(">H", 1000), CLOSE)


def _copy(frames: Frames, channel: int, connection: socket.socket) -> None:
    with suppress(OSError), connection:
        while data := connection.recv(1 << 15):
            frames.send(bytes([channel]) + data)


def _receive(frames: Frames, connections: dict[int, socket.socket]) -> None:
    for message in frames.messages():
        if message and message[0] in connections:  # a kubelet ignores other channels
            with suppress(OSError):
                connections[message[0]].sendall(message[1:])
    for connection in connections.values():  # the client has gone
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
