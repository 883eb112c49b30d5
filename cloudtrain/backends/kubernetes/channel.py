"""A program in a pod, and a connection to a port of it, over a websocket: `exec` and `portforward` of the API server.

The first byte of a message is its channel. https://github.com/kubernetes/kubernetes, staging/src/k8s.io/apimachinery/pkg/util/
remotecommand/constants.go (2026-11-23). v5 closes standard input, which v4 cannot: Kubernetes 1.30 and newer have it.
Ports have v4 alone: kubelet/pkg/cri/streaming/portforward/websocket.go (2026-11-25). The first message of each channel is
the port, and nothing says that only one direction has ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.http import Answer
from cloudtrain.backends.kubernetes.client import KubeApi, error_for_answer
from cloudtrain.errors import BackendError, MissingExtra, Unreachable

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

PROTOCOL, PORT_PROTOCOL = "v5.channel.k8s.io", "v4.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
DATA, ERROR = 0, 1  # of a port
PIECE = 1 << 15  # bytes of input in one message
OPEN_S = 60.0
TOO_OLD = "the API server of the cluster is too old for this command: it does not offer"
NEWER = "upgrade the cluster to Kubernetes 1.30 or newer, or use kubectl exec and kubectl port-forward"
LINGER_S = 10.0  # how long a port may be silent after the client here has sent its end


def exec_path(namespace: str, pod: str, container: str, argv: Sequence[str], *, stdin: bool, terminal: bool) -> str:
    """Return the path of the request that starts a program in a container. A terminal has one output for both."""
    query = [("container", container), ("stdout", "true"), *(("command", word) for word in argv)]
    query += [("tty", "true")] if terminal else [("stderr", "true")]
    query += [("stdin", "true")] if stdin else []
    return f"/api/v1/namespaces/{namespace}/pods/{pod}/exec?{urllib.parse.urlencode(query)}"


def run(api: KubeApi, path: str, stdin: int, stdout: int, stderr: int, terminal: bool) -> int:
    """Start a program, copy its streams, and return its exit code; blocking. `stdin` is -1 for none.

    Raises BackendError where the server refuses, Unreachable where the connection is lost.
    """
    with _connect(api, path, PROTOCOL) as connection:

        def end() -> None:
            connection.send(bytes([CLOSE, STDIN]))

        with _sender(connection, stdin, terminal, end):
            status = _receive(connection, {STDOUT: stdout, STDERR: stderr})
    if status is None:
        raise Unreachable(
            "the connection to the pod was lost before the command ended",
            "the command may still run in the pod: check before you run it again",
        )
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or ()
    for cause in causes:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise BackendError(f"the command was not run: {status.get('message') or 'no reason was given'}"[:500])


def port_path(namespace: str, pod: str, port: int) -> str:
    """Return the path of the request that connects to a port of a pod, on the pod's loopback address."""
    return f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward?ports={port}"


def connect_port(api: KubeApi, path: str, stdin: int, stdout: int, stderr: int, terminal: bool = False) -> int:
    """Connect to a port, copy both directions until one side closes it, and return 0, or 1 with a line on `stderr`.

    Blocking. Raises BackendError where the server refuses, Unreachable where it cannot be reached.
    """
    from websockets.exceptions import ConnectionClosed

    named: set[int] = set()  # channels whose first message has come
    ended, error = threading.Event(), b""
    with _connect(api, path, PORT_PROTOCOL) as connection, _sender(connection, stdin, terminal, ended.set):
        silent_s = 0.0
        with suppress(ConnectionClosed, OSError):  # OSError: the client here has gone
            while silent_s < LINGER_S:
                try:
                    message = connection.recv(timeout=1.0)
                except TimeoutError:
                    silent_s += 1.0 if ended.is_set() else 0.0
                    continue
                silent_s, data = 0.0, message.encode() if isinstance(message, str) else bytes(message)
                if data and data[0] not in named:
                    named.add(data[0])
                elif data[:1] == bytes([DATA]):
                    _write(stdout, data[1:])
                elif data[:1] == bytes([ERROR]):
                    error += data[1:]
    if error:
        _write(stderr, b" ".join(error.split())[:500] + b"\n")
    return 1 if error else 0


def _connect(api: KubeApi, path: str, protocol: str) -> ClientConnection:
    try:
        from websockets.exceptions import InvalidHandshake, InvalidStatus, NegotiationError
        from websockets.sync.client import connect
        from websockets.typing import Subprotocol
    except ModuleNotFoundError:
        raise MissingExtra("a program in a pod", "kubernetes") from None
    try:
        address, headers, stream = api.open_socket(path, OPEN_S)
        stream.settimeout(None)
        connection = connect(
            address,
            sock=stream,
            additional_headers=headers,
            subprotocols=[Subprotocol(protocol)],
            compression=None,
            max_size=None,
            open_timeout=OPEN_S,
        )
    except InvalidStatus as error:
        answer = Answer(error.response.status_code, {}, bytes(error.response.body or b""))
        raise error_for_answer(answer, "the API server refuses a connection to the pod") from None
    except NegotiationError as error:
        raise BackendError(f"{TOO_OLD} {protocol}: {error}", NEWER) from None
    except (InvalidHandshake, OSError, EOFError) as error:
        raise Unreachable(f"{api.access.server}{path.partition('?')[0]} cannot be reached: {error}") from None
    if connection.subprotocol != protocol:
        connection.close()
        raise BackendError(f"{TOO_OLD} {protocol}", NEWER)
    return connection  # type: ignore[return-value, unused-ignore]


def _receive(connection: ClientConnection, outputs: dict[int, int]) -> dict[str, Any] | None:
    """Write what comes to the outputs, and return the final status; None where the connection ends without one."""
    from websockets.exceptions import ConnectionClosed

    status: dict[str, Any] | None = None
    try:
        while True:
            message = connection.recv()
            data = message.encode() if isinstance(message, str) else bytes(message)
            if data[:1] == bytes([STATUS]):
                status = json.loads(data[1:])
            elif data and data[0] in outputs:
                _write(outputs[data[0]], data[1:])
    except ConnectionClosed:
        return status


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def _sender(connection: ClientConnection, stdin: int, terminal: bool, end: Callable[[], None]) -> Iterator[None]:
    """Send standard input, and the size of the terminal now and whenever it changes, in a thread.

    There `end` is called when the input has ended.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)

    def changed(*_: object) -> None:
        with suppress(BlockingIOError):
            os.write(wake, b"r")

    before: Any = None
    if terminal and threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGWINCH, changed)
        changed()
    thread = threading.Thread(target=_send, args=(connection.send, end, stdin, woken), daemon=True)
    thread.start()
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGWINCH, before)
        os.close(wake)
        thread.join(5)  # it may be in a read of a terminal
        os.close(woken)


def _send(send: Callable[[bytes], None], end: Callable[[], None], stdin: int, woken: int) -> None:
    from websockets.exceptions import ConnectionClosed

    sources = [woken, *([stdin] if stdin >= 0 else [])]
    with suppress(ConnectionClosed, OSError):
        while True:
            ready = select.select(sources, [], [])[0]
            if woken in ready:
                if not os.read(woken, 64):
                    return
                columns, lines = os.get_terminal_size(stdin)
                send(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": lines}).encode())
            if stdin in ready:
                data = os.read(stdin, PIECE)
                if data:
                    send(bytes([STDIN]) + data)
                else:
                    end()
                    sources.remove(stdin)
