"""Control channel between the supervisors of an attempt: JSON lines over TCP, each node connected to node 0.

    node 0 -> node    challenge; welcome; turn; check; start; stop; verdict; beat
    node -> node 0    hello; queue; taken; ready; checked; up; refuse; fail; left; end; stop; beat; told; home

Each side proves that it knows the attempt's token, where one was given. A single node opens no socket at all.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable

from ..loop import Loop

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    import socket
    from typing import Any

JOIN_S = 1800.0  # how long nodes may take to join: limits.max_wait, or CLOUDTRAIN_JOIN_TIMEOUT_S
FEWER_S = 300.0  # the same where fewer may begin (min_nodes)
WAIT_LINE_S = 60.0  # between two lines on who is missing
SILENCE_S = 10.0  # a node that sends nothing for so long is lost
LOOK_S = 2.0  # of the time between two looks at a channel at most so much counts as silence
INFORM_S = 10.0  # how long a node waits at its end until others have the outcome
MAX_MESSAGE = 64 * 1024

World = namedtuple(
    "World", "nodes node_rank master_host master_port addresses roles ports restarts", defaults=({}, (), 0)
)
World.__doc__ = (
    "The world that starts: number of nodes, this node's rank in it, where rank 0 will listen, nodes' addresses;"
    " with roles those of this node's role, and the addresses of each; which ports each node holds for its ranks;"
    " how often it was started again."
)
Listener = namedtuple("Listener", "start stop outcome log turn begin check restart", defaults=(None, None, None, None))
Listener.__doc__ = (
    "The supervisor's callbacks, and the node's log: start(World), stop(state), outcome(Outcome), turn() to take GPUs,"
    " begin() on node 0 when the first ranks start, check(World) to measure the node, restart() to end its ranks."
)


class Channel:
    """One connection, as messages. `closed(why)` is called once, unless this side closes it."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        message: Callable[[dict[str, Any]], None],
        closed: Callable[[str], None],
    ) -> None:
        self._loop, self._clock, self._socket = loop, loop.clock, connection
        self.message, self.closed = message, closed
        self._buffer = b""
        self._open = True
        self._silence_s, self._looked_at = 0.0, self._clock.monotonic()
        self.peer: str = connection.getpeername()[0]  # the other side's address
        connection.setblocking(False)
        import socket

        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(connection.fileno(), self._read)

    def send(self, **message: object) -> None:
        if not self._open:
            return
        try:
            # Messages are rare and small: a peer whose buffers are full has not read for minutes.
            data = json.dumps(message).encode() + b"\n"
            if self._socket.send(data) < len(data):
                self._end("the other node does not read what is sent to it")
        except OSError as error:
            self._end(error.strerror or str(error))

    def look(self) -> float:
        """Return for how many seconds nothing has come while this side looked; to be called every second.

        A process that stood still itself, on a machine that was busy or paused, cannot tell that the other one was silent.
        """
        now = self._clock.monotonic()
        self._silence_s += min(now - self._looked_at, LOOK_S)
        self._looked_at = now
        return self._silence_s

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()

    def _end(self, why: str) -> None:
        if self._open:
            self.close()
            self.closed(why)

    def _read(self) -> None:
        try:
            data = self._socket.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        if not data:
            self._end("the connection was closed")
            return
        self._silence_s, self._looked_at = 0.0, self._clock.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_MESSAGE:
            self._end("it is not a cloudtrain launcher of this version")
            return
        for line in lines:
            if not self._open:
                break
            try:
                self.message(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._end("it is not a cloudtrain launcher of this version")


def proof(token: str, side: str, nonce: str) -> str:
    """Return what only a holder of the token can say to a nonce."""
    if not token:
        return ""
    import hmac

    return hmac.new(token.encode(), f"{side}:{nonce}".encode(), "sha256").hexdigest()


def same(proof: str, wanted: str) -> bool:
    """Compare two proofs in constant time."""
    if not wanted:
        return True
    import hmac

    return hmac.compare_digest(proof.encode(), wanted.encode())
