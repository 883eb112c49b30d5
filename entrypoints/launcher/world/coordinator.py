"""Node 0's end of the control channel."""

from __future__ import annotations

import os
import socket
import time

from ..errors import Refused
from ..loop import Loop
from ..manifest import Orders
from .channel import SILENCE_S, TELL_S, Channel, Listener, World, proof, same
from .cluster import LOOPBACK, Cluster
from .outcome import EXIT_REFUSED, STALLED, Gang, Start, Verdict, refusal

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any


class Hub:
    """Node 0's end: takes the others in, asks the gang what follows, and tells everybody."""

    def __init__(
        self, loop: Loop, orders: Orders, cluster: Cluster, token: str, listener: Listener, join_s: float
    ) -> None:
        self._loop, self._orders, self._cluster, self._token, self._listener = loop, orders, cluster, token, listener
        self._join_by = time.monotonic() + join_s
        self._gang = Gang(orders, self._join_by, join_s)
        self._guests: dict[Channel, float] = {}  # not yet proven, and until when they may be so
        self._members: dict[int, Channel] = {}
        self._told: set[int] = set()
        self._home: set[int] = set()
        self._server: socket.socket | None = None
        self._verdict: Verdict | None = None
        self._told_by = 0.0
        self._awaited = 0  # how many nodes have to have heard the verdict
        self._started = False
        self._port: socket.socket | None = None  # held until the end
        self._gang.join(0, socket.gethostname(), orders.processes_per_node)

    def open(self) -> tuple[str, int] | None:
        """Listen for the other nodes and return where, None for a single node; raises Refused."""
        if self._orders.nodes == 1:
            return None
        host, port = self._cluster.control_host, self._cluster.control_port
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            server = socket.socket(family, kind, protocol)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen(128)
        except OSError as error:
            raise Refused(f"node 0 cannot listen on {host}:{port}: {error.strerror or error}") from None
        server.setblocking(False)
        self._server = server
        self._loop.watch(server.fileno(), self._accept)
        return host, server.getsockname()[1]

    def ready(self) -> None:
        self._gang.ready(0)
        self._decide()

    def refuse(self, reason: str) -> None:
        self._gang.refuse(0, reason)
        self._decide()

    def fail(self, rank: int, code: int, at: float, reason: str) -> None:
        self._gang.fail(0, rank, code, at, reason)
        self._decide()

    def end(self) -> None:
        self._gang.end(0)
        self._decide()

    def idle(self, quiet_s: float, idle_s: float) -> None:
        """For how long no rank of this node has spoken, and the idlest has done nothing."""
        self._gang.idle(0, quiet_s, idle_s)

    def stop(self, state: str) -> None:
        before = self._gang.stopping
        self._gang.stop(state, time.time())
        if before is None and self._verdict is None:
            for channel in list(self._members.values()):
                channel.send(kind="stop", state=state)
            self._listener.stop(state)
        self._decide()

    def tick(self, beat: bool) -> None:
        """Say that we live, notice who does not any more, and decide what only time decides."""
        now = time.monotonic()
        for node, channel in list(self._members.items()):
            if beat:
                channel.send(kind="beat")
            if now - channel.heard > SILENCE_S:
                channel.close()
                self._lose(node, f"nothing was heard for {SILENCE_S:g} s")
        if beat and self._gang.stalled:
            self.stop(STALLED)
        for channel, until in list(self._guests.items()):
            if now > until:
                del self._guests[channel]
                channel.close()
        self._decide()

    @property
    def patience_s(self) -> float:
        """How long `tick` may be left waiting."""
        return self._gang.patience_s

    @property
    def settled(self) -> bool:
        """Whether all others have heard the verdict (or will not): this node may leave."""
        if self._verdict is None:
            return False
        if time.monotonic() > self._told_by:
            return True
        return not set(self._members) - self._told and len(self._told) >= self._awaited

    def home(self) -> None:
        """This node's results are where they belong; the others say so themselves."""

    @property
    def all_home(self) -> bool:
        return set(self._members) <= self._home

    def close(self) -> None:
        for channel in [*self._guests, *self._members.values()]:
            channel.close()
        if self._server is not None:
            self._loop.unwatch(self._server.fileno())
            self._server.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()  # type: ignore[union-attr]
        except OSError:
            return
        nonce = os.urandom(16).hex()
        channel = Channel(
            self._loop,
            connection,
            lambda message: self._hello(channel, nonce, message),
            lambda _: self._leave(channel),
        )
        self._guests[channel] = time.monotonic() + SILENCE_S
        channel.send(kind="challenge", nonce=nonce)

    def _leave(self, guest: Channel) -> None:
        self._guests.pop(guest, None)

    def _hello(self, channel: Channel, nonce: str, message: dict[str, Any]) -> None:
        """Judge the first message of a guest: a node of this attempt that knows the token becomes a member."""
        node = int(message["node"])
        problem = None
        if not same(message["proof"], proof(self._token, "node", nonce)):
            problem = f"node {node} does not know the attempt's token"
        elif message["attempt"] != self._orders.attempt_id:
            problem = f"node {node} belongs to attempt {message['attempt']}, not to {self._orders.attempt_id}"
        elif self._verdict is None:
            problem = self._gang.join(node, str(message["hostname"]), int(message["processes"]))
        del self._guests[channel]
        if problem is not None:
            channel.send(kind="verdict", **refusal(problem)._asdict())
            channel.close()
            return
        self._members[node] = channel
        channel.message = lambda known: self._heard(node, known)
        channel.closed = lambda why: self._lose(node, why)
        channel.send(kind="welcome", proof=proof(self._token, "hub", message["nonce"]))
        if self._verdict is not None:  # it comes when all is over: it need not wait to learn so
            channel.send(kind="verdict", **self._verdict._asdict())
        self._decide()

    def _heard(self, node: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "told":
            self._told.add(node)
        elif kind == "home":
            self._home.add(node)
        elif self._verdict is not None:
            return
        elif kind == "beat":
            self._gang.hear(node, float(message["at"]), time.time())
            if "quiet_s" in message:
                self._gang.idle(node, float(message["quiet_s"]), float(message["idle_s"]))
        elif kind == "ready":
            self._gang.ready(node)
        elif kind == "refuse":
            self._gang.refuse(node, str(message["reason"]))
        elif kind == "fail":
            self._gang.fail(
                node, int(message["rank"]), int(message["code"]), float(message["at"]), str(message["reason"])
            )
        elif kind == "end":
            self._gang.end(node)
        elif kind == "stop":
            self.stop(str(message["state"]))
        self._decide()

    def _lose(self, node: int, why: str) -> None:
        self._members.pop(node, None)
        self._told.add(node)
        self._gang.lose(node, why)
        self._decide()

    def _decide(self) -> None:
        found = self._gang.decide(time.monotonic())
        if isinstance(found, Start):
            self._start(found)
        elif isinstance(found, Verdict):
            self._verdict = found
            self._told_by = time.monotonic() + TELL_S
            # Nodes that are still on their way should hear why there is nothing to join, or they would wait for long.
            early = found.exit_code == EXIT_REFUSED and not self._started and time.monotonic() < self._join_by
            self._awaited = self._orders.nodes - 1 if early else 0
            for channel in list(self._members.values()):
                channel.send(kind="verdict", **found._asdict())
            self._listener.verdict(found)

    def _start(self, start: Start) -> None:
        self._started = True
        host, port = self._cluster.master_host, self._cluster.master_port
        if len(start.node_ranks) == 1:
            host, port = LOOPBACK, 0
        if not port:
            from .ports import hold

            self._port = hold()
            port = self._port.getsockname()[1]
        for new, node in enumerate(start.node_ranks):
            world = World(len(start.node_ranks), new, host, port)
            if node == 0:
                own = world
            elif node in self._members:
                self._members[node].send(kind="start", **world._asdict())
        self._listener.start(own)
