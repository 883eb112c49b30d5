"""The coordinator: node 0's side of the control channel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..errors import Refused
from ..health.stragglers import Stragglers
from ..health.verdict import Check, Checks
from ..loop import Loop
from ..manifest import Manifest
from . import ports
from .channel import FEWER_S, INFORM_S, JOIN_S, SILENCE_S, WAIT_LINE_S, Channel, Listener, World, proof, same
from .cluster import LOOPBACK, Cluster
from .outcome import EXIT_REFUSED, ClusterState, Outcome, Restart, Start, refused_outcome

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    import socket
    from typing import Any

    from .worker import Worker


class Coordinator:
    """Node 0's side: accepts the other nodes, decides with ClusterState, sends the decisions to all."""

    def __init__(
        self, loop: Loop, manifest: Manifest, cluster: Cluster, token: str, listener: Listener, join_s: float
    ) -> None:
        self._loop, self._manifest, self._cluster, self._token, self._listener = (
            loop,
            manifest,
            cluster,
            token,
            listener,
        )
        self._clock, self._log = loop.clock, listener.log
        self._join_s, self._join_by = join_s, self._clock.monotonic() + join_s
        self._say_at = self._clock.monotonic() + WAIT_LINE_S
        self._state = ClusterState(manifest, self._join_by, join_s)
        self._state.checks = Checks(manifest, cluster.launched or cluster.control_host == LOOPBACK)
        self._stragglers = Stragglers()
        self._guests: dict[Channel, float] = {}  # not yet proven, and until when they may be so
        self._workers: dict[int, Channel] = {}
        self._informed: set[int] = set()
        self._finished: set[int] = set()
        self._turns: list[tuple[str, int]] = []  # hosts and nodes that have no GPUs yet, in the order of all attempts
        self._turn: tuple[str, int] | None = None  # whose turn was announced
        self._server: socket.socket | None = None
        self._outcome: Outcome | None = None
        self._inform_by = 0.0
        self._awaited = 0  # how many nodes must have received the outcome
        self._started = False
        self._port: socket.socket | None = None  # held until the end, as the next ones
        self._held: list[socket.socket] = []
        self._ports: dict[int, list[int]] = {}  # that nodes hold for their ranks
        self._addresses: dict[int, str] = {}  # of the nodes that take part
        self._state.join(0, cluster.name, manifest.processes_per_node)

    def open(self) -> tuple[str, int] | None:
        """Listen for the other nodes and return where, None for a single node; raises Refused."""
        if self._manifest.nodes == 1:
            return None
        import socket

        host, port = self._cluster.control_host, self._cluster.control_port
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            server = socket.socket(family, kind, protocol)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen(128)
        except OSError as error:
            reason = f"node 0 cannot listen on {host}:{port}: {error.strerror or error}"
            raise Refused(f"{reason} (SSH: set `internal` of its host to an address of its own)") from None
        server.setblocking(False)
        self._server = server
        self._loop.watch(server.fileno(), self._accept)
        return host, server.getsockname()[1]

    def queue(self, host: str) -> None:
        """This node is to take GPUs of a host."""
        self._queue(0, host)
        self._decide()

    def taken(self) -> None:
        """This node has its GPUs."""
        self._turns.pop(0)
        self._decide()

    def ready(self) -> None:
        self._held = ports.hold_all(self._manifest)
        self._ports[0] = ports.numbers(self._held)
        self._state.ready(0)
        self._decide()

    def checked(self, figures: dict[str, Any]) -> None:
        """This node has been measured."""
        self._state.checks.add(0, figures)
        self._decide()

    def refuse(self, reason: str) -> None:
        self._state.refuse(0, reason)
        self._decide()

    def fail(self, rank: int, code: int, at: float, reason: str, passes: bool = False) -> None:
        """A rank of this node has failed; `passes`: its world may work when it is started again."""
        self._state.fail(0, rank, code, at, reason, passes)
        self._decide()

    def leave(self, rank: int) -> None:
        """A rank of this node has ended with 0, and others run."""
        self._state.leave(rank, self._clock.monotonic())

    def end(self) -> None:
        self._state.end(0)
        self._decide()

    def idle(self, quiet_s: float, idle_s: float, gpus_idle_s: float) -> None:
        """For how long no rank of this node has printed a line, the idlest has used no CPU, and none a GPU."""
        self._state.idle(0, quiet_s, idle_s, gpus_idle_s)

    def pace(self, speed: dict[str, object]) -> None:
        """How fast this node is, reported every some seconds: the nodes are compared then."""
        self._stragglers.add(0, speed)
        for node, text in self._stragglers.look(self._clock.monotonic()):
            line = f"straggler: {self._state.name(node)}: {text}"
            self._log.say(line)
            self._log.event("alarm", straggler=node, reason=line)

    def stop(self, state: str) -> None:
        before = self._state.stopping
        self._state.stop(state, self._clock.now())
        if before is None and self._outcome is None:
            for channel in list(self._workers.values()):
                channel.send(kind="stop", state=state)
            self._listener.stop(state)
        self._decide()

    def tick(self, beat: bool) -> None:
        """Send heartbeats, detect lost nodes, and decide what depends on time."""
        now = self._clock.monotonic()
        for node, channel in list(self._workers.items()):
            if beat:
                channel.send(kind="beat")
            if self._outcome is None and channel.look() > SILENCE_S:  # later it is silent while it uploads its results
                channel.close()
                self._lose(node, f"no message arrived for {SILENCE_S:g} s")
        if beat and (hung := self._state.hung):
            self.stop(hung)
        if beat and (line := self._state.left_early(now)):
            self._log.warn(line)
        if now >= self._say_at and (missing := self._state.missing):
            self._say_at = now + WAIT_LINE_S
            names, here = ", ".join(map(str, missing)), self._manifest.nodes - len(missing)
            left_s = max(0.0, self._join_by - now)
            self._log.say(
                f"{here} of {self._manifest.nodes} nodes have joined; waiting {left_s:.0f} s more "
                f"for node {names} (limits.max_wait)"
            )
        for channel, until in list(self._guests.items()):
            if now > until:
                del self._guests[channel]
                channel.close()
        self._decide()

    @property
    def patience_s(self) -> float:
        """How long `tick` may be left waiting."""
        return self._state.patience_s

    @property
    def settled(self) -> bool:
        """Whether all others have received the outcome (or will not): this node may leave."""
        if self._outcome is None:
            return False
        if self._clock.monotonic() > self._inform_by:
            return True
        return not set(self._workers) - self._informed and len(self._informed) >= self._awaited

    def finished(self) -> None:
        """This node's results are uploaded; the others report it themselves."""

    @property
    def all_finished(self) -> bool:
        return set(self._workers) <= self._finished

    def close(self) -> None:
        for channel in [*self._guests, *self._workers.values()]:
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
            lambda message: self._on_hello(channel, nonce, message),
            lambda _: self._leave(channel),
        )
        self._guests[channel] = self._clock.monotonic() + SILENCE_S
        channel.send(kind="challenge", nonce=nonce)

    def _leave(self, guest: Channel) -> None:
        self._guests.pop(guest, None)

    def _on_hello(self, channel: Channel, nonce: str, message: dict[str, Any]) -> None:
        """Check the first message of a connection: a node of this attempt that knows the token becomes a worker."""
        node = int(message["node"])
        problem = None
        if not same(message["proof"], proof(self._token, "node", nonce)):
            problem = f"node {node} has a wrong token"
        elif message["attempt"] != self._manifest.attempt_id:
            problem = f"node {node} belongs to attempt {message['attempt']}, not to {self._manifest.attempt_id}"
        elif self._outcome is None:
            problem = self._state.join(node, str(message["hostname"]), int(message["processes"]))
            # The time counts from the node that came first, and that may not be this one.
            self._join_by = min(
                self._join_by, self._clock.monotonic() + self._join_s - float(message.get("waited_s") or 0)
            )
            self._state.join_by(self._join_by)
        del self._guests[channel]
        if problem is not None:
            channel.send(kind="verdict", **refused_outcome(problem)._asdict())
            channel.close()
            return
        self._workers[node] = channel
        channel.message = lambda received: self._on_message(node, received)
        channel.closed = lambda why: self._lose(node, why)
        channel.send(kind="welcome", proof=proof(self._token, "hub", message["nonce"]))
        if self._outcome is not None:  # it comes when all is over: it need not wait to learn so
            channel.send(kind="verdict", **self._outcome._asdict())
        self._decide()

    def _on_message(self, node: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "told":
            self._informed.add(node)
        elif kind == "home":
            self._finished.add(node)
        elif self._outcome is not None:
            return
        elif kind == "beat":
            self._state.record_clock(node, float(message["at"]), self._clock.now())
            if message.get("speed") and node < self._manifest.main_nodes:
                self._stragglers.add(node, dict(message["speed"]))
            if "quiet_s" in message:
                signs = (float(message[name]) for name in ("quiet_s", "idle_s", "gpus_idle_s"))
                self._state.idle(node, *signs)
        elif kind == "checked":
            self._state.checks.add(node, dict(message["figures"]))
        elif kind == "queue":
            self._queue(node, str(message["host"]))
        elif kind == "taken":
            self._turns.pop(0)
        elif kind == "ready":
            self._ports[node] = [int(port) for port in message.get("ports") or ()]
            self._state.ready(node)
        elif kind == "up":
            if name := self._state.roles.up(node):
                self._log.say(f"role {name} is ready")
                self._log.event("role", name=name, waits=[])
                self._start_roles()
        elif kind == "refuse":
            self._state.refuse(node, str(message["reason"]))
        elif kind == "fail":
            rank, code, at = int(message["rank"]), int(message["code"]), float(message["at"])
            self._state.fail(node, rank, code, at, str(message["reason"]), bool(message["passes"]))
        elif kind == "left":
            self._state.leave(int(message["rank"]), self._clock.monotonic())
        elif kind == "end":
            self._state.end(node)
        elif kind == "stop":
            self.stop(str(message["state"]))
        self._decide()

    def _lose(self, node: int, why: str) -> None:
        self._workers.pop(node, None)
        self._informed.add(node)
        self._state.lose(node, why)
        self._decide()

    def _decide(self) -> None:
        decision = self._state.decide(self._clock.monotonic())
        for line in self._state.checks.take_lines():
            (self._log.warn if self._state.checks.findings else self._log.say)(line)
        if isinstance(decision, Start):
            self._start(decision)
        elif isinstance(decision, Check):
            self._find_addresses(decision.node_ranks)
            self._start_world(list(decision.node_ranks), "check")
        elif isinstance(decision, Outcome):
            self._outcome = decision
            self._inform_by = self._clock.monotonic() + INFORM_S
            # Nodes that join late must receive the reason, or they would wait until their timeout.
            early = decision.exit_code == EXIT_REFUSED and not self._started and self._clock.monotonic() < self._join_by
            self._awaited = self._manifest.nodes - 1 if early else 0
            for channel in list(self._workers.values()):
                channel.send(kind="verdict", **decision._asdict())
            self._listener.outcome(decision)
        elif isinstance(decision, Restart):
            self._restart(decision)
        elif self._turns and self._outcome is None:
            self._next_turn()

    def _restart(self, restart: Restart) -> None:
        """Let all nodes end what is left of the world; it starts again when each has said that it is ready."""
        self._log.warn(f"restart {restart.number} of {self._manifest.restarts} on the same nodes: {restart.reason}")
        for channel in list(self._workers.values()):
            channel.send(kind="restart")
        self._listener.restart()

    def _queue(self, node: int, host: str) -> None:
        """Note where a node is to take GPUs; two nodes of one host could wait for each other's attempts for ever."""
        twin = next((other for at, other in self._turns if at == host), None)
        if twin is not None:
            self._state.refuse(
                node, f"it is on the same machine as node {twin}, and two nodes cannot share the machine's GPUs"
            )
        self._turns.append((host, node))

    def _next_turn(self) -> None:
        """Let the next node take its GPUs: all attempts take those of their hosts in the same order, by the hosts' ids.

        A node waits only while its attempt holds GPUs of hosts before its own, so attempts never wait in a circle.
        """
        if self._turn is None:
            ours = self._manifest
            asking = sum(ours.gpus_of(node) > 0 and not ours.shared_gpus(node)[0] for node in (0, *self._workers))
            if len(self._turns) < asking or (self._state.missing and self._clock.monotonic() < self._join_by):
                return
            self._state.closed = True  # a host that came now might be before those whose GPUs are held
            self._turns.sort()
        if self._turn != self._turns[0]:
            self._turn = self._turns[0]
            node = self._turn[1]
            if node == 0:
                self._listener.turn()
            elif node in self._workers:
                self._workers[node].send(kind="turn")

    def _start(self, start: Start) -> None:
        self._started = True
        if self._listener.begin is not None:
            self._listener.begin()
        self._find_addresses(start.node_ranks)
        if not self._manifest.roles:
            self._start_world(list(start.node_ranks))
            return
        self._start_roles()
        for name, others in self._state.roles.waiting.items():
            self._log.say(f"role {name} starts when {' and '.join(others)} {'is' if len(others) == 1 else 'are'} ready")
            self._log.event("role", name=name, waits=others)

    def _find_addresses(self, nodes: Sequence[int]) -> None:
        host = LOOPBACK if len(nodes) == 1 else self._cluster.master_host
        peers = {node: channel.peer for node, channel in self._workers.items()}
        self._addresses = {node: host if node == 0 else peers.get(node, "") for node in nodes}

    def _start_roles(self) -> None:
        """Start the roles whose time has come, each as a world of its own."""
        if self._outcome is None and self._state.stopping is None:
            for nodes in self._state.roles.due():
                self._start_world(nodes)

    def _start_world(self, nodes: list[int], kind: str = "start") -> None:
        """Start the ranks of nodes that are one world, or measure these nodes (kind "check")."""
        first = nodes[0]
        host, port = self._addresses[first], self._cluster.master_port
        if len(nodes) == 1:
            host, port = LOOPBACK, 0
        if self._state.restarts:
            port = 0  # a new one: the store of the last world had the former
        if first:  # a service's, which its first node holds
            port = self._ports[first][0]
        elif not port:
            self._port = ports.hold()
            [port] = ports.numbers([self._port])
        addresses = [self._addresses[node] for node in nodes]
        held = [self._ports.get(node, []) for node in nodes]
        roles = self._state.roles.addresses(self._addresses)
        own = None
        for new, node in enumerate(nodes):
            world = World(len(nodes), new, host, port, addresses, roles, held, self._state.restarts)
            if node == 0:
                own = world
            elif node in self._workers:
                self._workers[node].send(kind=kind, **world._asdict())
        if own is not None:
            (self._listener.check if kind == "check" else self._listener.start)(own)


def channel_end(
    loop: Loop, manifest: Manifest, cluster: Cluster, environ: Mapping[str, str], token: str, listener: Listener
) -> Coordinator | Worker:
    """Return this node's end of the control channel.

    A rank that another launcher has started is a cluster of its own: it has no peers of ours to wait for.
    """
    usual_s = JOIN_S if manifest.fewest_nodes == manifest.nodes else FEWER_S
    join_s = float(environ.get("CLOUDTRAIN_JOIN_TIMEOUT_S") or manifest.join_s or usual_s)
    if cluster.launched:
        manifest.nodes = manifest.processes_per_node = 1
        manifest.restarts = 0
    if cluster.node_rank == 0 or cluster.launched:
        return Coordinator(loop, manifest, cluster, token, listener, join_s)
    from .worker import Worker  # only here, and with it socket: a single node needs neither

    return Worker(loop, manifest, cluster, token, listener, join_s)
