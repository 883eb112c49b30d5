"""Connections to ports of a pod: our server against the official client, our client against what goes wrong, and the command."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.kubernetes import channel
from cloudtrain.backends.kubernetes.client import KubeApi
from cloudtrain.errors import BackendError
from cloudtrain.runs.inside import Forward
from tests.backends.forwarded import check_forward
from tests.backends.kubernetes.test_exec import cluster, pod  # noqa: F401 - fixtures
from tests.backends.kubernetes.test_quickstart import place  # noqa: F401 - a fixture
from tests.conftest import WAIT_S, wait_for
from tests.simulators.kubernetes_cluster.server import Cluster

EVERY_BYTE = bytes(range(256)) * 2000


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], int]]:
    """Serve each connection to a port by a function; return the port."""
    listeners: list[socket.socket] = []

    def start(answer: Callable[[socket.socket], None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return listener.getsockname()[1]

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def reverse(connection: socket.socket) -> None:
    """Answer as many bytes as every byte has, from the last to the first."""
    with connection:
        connection.sendall(read(connection, len(EVERY_BYTE))[::-1])


def read(connection: socket.socket, size: int = -1) -> bytes:
    data = b""
    while len(data) != size and (piece := connection.recv(1 << 16)):
        data += piece
    return data


@pytest.fixture
def forward(cluster: Cluster, pod: str) -> Iterator[Callable[[int], socket.socket]]:  # noqa: F811
    """Return a function that connects through `Forward` and our client to a port of the pod, and what it complained."""
    made: list[Forward] = []

    def connect(port: int) -> socket.socket:
        from cloudtrain.backends.shell import Shell

        api = KubeApi(str(cluster.kubeconfig), None)
        path = channel.port_path("default", pod, port)
        shell = Shell(stream=lambda *streams: channel.connect_port(api, path, *streams))
        forward = Forward(lambda: shell, connect.complaints.append, 0)
        made.append(forward)
        threading.Thread(target=forward.serve, daemon=True).start()
        return socket.create_connection(("127.0.0.1", forward.port), timeout=WAIT_S)

    connect.complaints = []
    yield connect
    for each in made:
        each.close()


def test_the_server_answers_a_client_that_is_not_ours(cluster: Cluster, pod: str, serve):  # noqa: F811
    """The package `kubernetes`: data of two ports in one websocket, and the error of one on which nothing listens."""
    from kubernetes import config
    from kubernetes.client import CoreV1Api
    from kubernetes.stream import portforward

    api = CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))
    port = serve(reverse)
    forward = portforward(api.connect_get_namespaced_pod_portforward, pod, "default", ports=f"{port},1")
    theirs = forward.socket(port)
    theirs.settimeout(WAIT_S)
    theirs.sendall(EVERY_BYTE)
    assert read(theirs) == EVERY_BYTE[::-1]
    wait_for(lambda: forward.error(1), "the error of the other port")
    assert "error forwarding port 1 to pod" in forward.error(1) and forward.error(port) is None


def test_our_client_says_the_same(serve, forward):
    port = serve(reverse)
    with forward(port) as here:
        here.sendall(EVERY_BYTE)
        assert read(here) == EVERY_BYTE[::-1], "and the end, because the server has closed it"
    with forward(1) as here:
        assert read(here) == b""
    wait_for(lambda: forward.complaints, "the complaint")
    assert "error forwarding port 1 to pod" in forward.complaints[0]


def test_who_has_sent_everything_still_gets_the_answer(serve, forward):
    """v4 cannot say that one direction has ended: the connection stays for what is still to come."""
    with forward(serve(reverse)) as here:
        here.sendall(EVERY_BYTE)
        here.shutdown(socket.SHUT_WR)
        assert read(here) == EVERY_BYTE[::-1]
    assert not forward.complaints


def test_a_connection_that_is_closed_here_is_closed_there(serve, forward, monkeypatch):
    monkeypatch.setattr(channel, "LINGER_S", 1.0)
    ended = threading.Event()

    def wait(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"hello")
            read(connection)
            ended.set()

    here = forward(serve(wait))
    assert here.recv(5) == b"hello"
    here.close()
    assert ended.wait(WAIT_S)


def test_what_the_server_refuses(cluster: Cluster, pod: str):  # noqa: F811
    api = KubeApi(str(cluster.kubeconfig), None)
    path = channel.port_path("default", pod, 80)
    for verb in ("get", "create"):
        cluster.resources.denied.add((verb, "pods/portforward"))
        with pytest.raises(BackendError, match=f"permission denied: .*cannot {verb} resource .pods/portforward"):
            channel.connect_port(api, path, -1, 1, 2)
        cluster.resources.denied.clear()
    with pytest.raises(BackendError, match="not found"):
        channel.connect_port(api, channel.port_path("default", "absent", 80), -1, 1, 2)


def test_a_server_in_a_rank_is_reached(place, tmp_path: Path):  # noqa: F811
    before = len(place.cluster.server.requests)
    check_forward(tmp_path, "cluster")
    paths = [path for _, path in place.cluster.server.requests[before:]]
    assert any("/portforward?" in path for path in paths) and not any("/exec?" in path for path in paths)
