"""A program in a pod over a websocket: the protocol v5.channel.k8s.io of the API server's `exec`.

The first byte of a message is its channel. https://github.com/kubernetes/kubernetes, staging/src/k8s.io/apimachinery/pkg/util/
remotecommand/constants.go (2026-11-23). v5 closes standard input, which v4 cannot: Kubernetes 1.30 and newer have it.
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

PROTOCOL = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
PIECE = 1 << 15  # bytes of input in one message
OPEN_S = 60.0


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
    with _connect(api, path) as connection, _sender(connection, stdin, terminal):
        status = _receive(connection, {STDOUT: stdout, STDERR: stderr})
    if status is None:
        raise Unreachable(
            "the connection to the pod was lost before the command ended", "the pod or its node may have ended"
        )
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or ()
    for cause in causes:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise BackendError(f"the command was not run: {status.get('message') or 'no reason was given'}"[:500])


def _connect(api: KubeApi, path: str) -> ClientConnection:
    try:
        from websockets.exceptions import InvalidHandshake, InvalidStatus, NegotiationError
        from websockets.sync.client import connect
        from websockets.typing import Subprotocol
    except ModuleNotFoundError:
        raise MissingExtra("a program in a pod", "kubernetes") from None
    address, headers, tls, proxy = api.socket_address(path)
    try:
        connection = connect(
            address,
            additional_headers=headers,
            subprotocols=[Subprotocol(PROTOCOL)],
            ssl=tls,
            proxy=proxy or True,
            compression=None,
            max_size=None,
            open_timeout=OPEN_S,
        )
    except InvalidStatus as error:
        answer = Answer(error.response.status_code, {}, bytes(error.response.body or b""))
        raise error_for_answer(answer, "no program can be started in the pod") from None
    except NegotiationError as error:
        raise BackendError(f"the API server does not offer {PROTOCOL}: {error}", "Kubernetes 1.30 or newer") from None
    except (InvalidHandshake, OSError, EOFError) as error:
        raise Unreachable(f"{address.partition('?')[0]} cannot be reached: {error}") from None
    if connection.subprotocol != PROTOCOL:
        connection.close()
        raise BackendError(f"the API server does not offer {PROTOCOL}", "Kubernetes 1.30 or newer")
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
def _sender(connection: ClientConnection, stdin: int, terminal: bool) -> Iterator[None]:
    """Send standard input, and the size of the terminal now and whenever it changes, in a thread."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)

    def changed(*_: object) -> None:
        with suppress(BlockingIOError):
            os.write(wake, b"r")

    before: Any = None
    if terminal and threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGWINCH, changed)
        changed()
    thread = threading.Thread(target=_send, args=(connection.send, stdin, woken), daemon=True)
    thread.start()
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGWINCH, before)
        os.close(wake)
        thread.join(5)  # it may be in a read of a terminal
        os.close(woken)


def _send(send: Callable[[bytes], None], stdin: int, woken: int) -> None:
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
                    send(bytes([CLOSE, STDIN]))
                    sources.remove(stdin)
