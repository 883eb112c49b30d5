"""A worker's side of the control channel: every node except node 0."""

from __future__ import annotations

import os
import socket

from ..loop import Loop
from ..manifest import Manifest
from . import ports
from .channel import INFORM_S, SILENCE_S, WAIT_LINE_S, Channel, Listener, World, proof, same
from .cluster import Cluster
from .outcome import EXIT_RESUMABLE, HUNG, Outcome, missing_outcome, refused_outcome

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 5.0  # half as long again each time, a quarter more or less by chance
MANY, RETRY_OF_MANY_S = 128, 7.0  # of so many nodes each asks at most once in 5 s, from the first time on


class Worker:
    """Every other node's side: joins node 0, reports to it, follows its decisions."""

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
        self._clock, self._join_s = loop.clock, join_s
        self._join_by = self._clock.monotonic() + join_s
        many = manifest.nodes >= MANY
        self._next_try, self._retry_s = 0.0, RETRY_OF_MANY_S if many else FIRST_RETRY_S
        self._longest_retry_s = RETRY_OF_MANY_S if many else LONGEST_RETRY_S
        self._began = self._clock.monotonic()
        self._say_at = self._began + WAIT_LINE_S
        self._nonce = os.urandom(16).hex()
        self._channel: Channel | None = None
        self._welcome = False
        self._stopping: str | None = None  # what was asked for, by us or by others
        self._held_back: list[dict[str, Any]] = []  # messages from before node 0 accepted us
        self._signs: dict[str, float] = {}  # for how long no rank has printed a line, and the idlest has used no CPU
        self._speed: dict[str, object] = {}  # of this node's steps and GPUs
        self._over = False
        self._why, self._is_known = "it does not answer", True
        self._held: list[socket.socket] = []  # ports of this node's ranks, until the end
        self._given_up: Outcome | None = None  # the outcome if node 0 is never reached

    def open(self) -> None:
        """Begin to join; `tick` tries again until it works."""
        self.tick(False)

    def queue(self, host: str) -> None:
        """This node is to take GPUs of a host."""
        self._report(kind="queue", host=host)

    def taken(self) -> None:
        """This node has its GPUs."""
        self._report(kind="taken")

    def ready(self) -> None:
        self._held = ports.hold_all(self._manifest)
        self._report(kind="ready", ports=ports.numbers(self._held))

    def checked(self, figures: dict[str, Any]) -> None:
        """This node has been measured."""
        self._report(kind="checked", figures=figures)

    def up(self) -> None:
        """This node's service is ready."""
        self._report(kind="up")

    def refuse(self, reason: str) -> None:
        self._report(kind="refuse", reason=reason)
        if not self._welcome:  # node 0 should receive it, but is not waited for long
            self._given_up = refused_outcome(reason)
            self._join_by = min(self._join_by, self._clock.monotonic() + INFORM_S)

    def fail(self, rank: int, code: int, at: float, reason: str, passes: bool = False) -> None:
        self._report(kind="fail", rank=rank, code=code, at=at, reason=reason, passes=passes)

    def leave(self, rank: int) -> None:
        self._report(kind="left", rank=rank)

    def end(self) -> None:
        self._report(kind="end")

    def idle(self, quiet_s: float, idle_s: float, gpus_idle_s: float) -> None:
        """For how long no rank of this node has printed a line, the idlest has used no CPU, and none a GPU.

        It is sent with the next beat.
        """
        self._signs = {"quiet_s": quiet_s, "idle_s": idle_s, "gpus_idle_s": gpus_idle_s}

    def pace(self, speed: dict[str, object]) -> None:
        """How fast this node is, as Stragglers compares it; it is sent with the next beat."""
        self._speed = speed

    def stop(self, state: str) -> None:
        self._report(kind="stop", state=state)
        self._stopping = self._stopping or state
        if not self._welcome:
            self._settle(
                Outcome(state, EXIT_RESUMABLE, "launcher", None, "stopped by SIGTERM before the ranks started")
            )

    def tick(self, beat: bool) -> None:
        now = self._clock.monotonic()
        if self._over:
            return
        if self._channel is None:
            if now >= self._join_by:
                where = f"{self._cluster.control_host}:{self._cluster.control_port}"
                late = f"node 0 was not reached at {where} within {self._join_s:g} s: {self._why}"
                # A name that DNS does not know yet is that of a machine which has not come.
                self._settle(self._given_up or (refused_outcome if self._is_known else missing_outcome)(late))
            elif now >= self._next_try:
                self._connect()
                if self._channel is None and now >= self._say_at and not self._given_up:
                    self._say_at = now + WAIT_LINE_S
                    self._listener.log.say(self._describe_wait(self._join_by - now))
        elif self._channel.look() > SILENCE_S:
            self._channel.close()
            self._on_closed(f"no message arrived for {SILENCE_S:g} s")
        elif beat and self._welcome:
            self._channel.send(kind="beat", at=self._clock.now(), speed=self._speed, **self._signs)

    @property
    def patience_s(self) -> float:
        """How long `tick` may be left waiting."""
        waits = self._channel is not None or self._over
        return 1.0 if waits else max(0.01, self._next_try - self._clock.monotonic())

    @property
    def settled(self) -> bool:
        return self._over

    def finished(self) -> None:
        """This node's results are uploaded: node 0 closes the connection when all nodes' are."""
        if self._channel is not None:
            self._channel.send(kind="home")

    @property
    def all_finished(self) -> bool:
        return self._channel is None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _connect(self) -> None:
        try:
            connection = socket.create_connection((self._cluster.control_host, self._cluster.control_port), timeout=2.0)
        except OSError as error:
            self._why, self._is_known = error.strerror or str(error), not isinstance(error, socket.gaierror)
            self._next_try = self._clock.monotonic() + self._retry_s * (0.75 + os.urandom(1)[0] / 512)
            self._retry_s = min(self._longest_retry_s, self._retry_s * 1.5)
            return
        self._channel = Channel(self._loop, connection, self._on_message, self._on_closed)

    def _describe_wait(self, left_s: float) -> str:
        node, where = self._cluster.node_rank, f"{self._cluster.control_host}:{self._cluster.control_port}"
        return (
            f"node {node} does not reach node 0 at {where}: {self._why}; trying for {left_s:.0f} s more (limits.max_wait); "
            "`cloudtrain doctor TARGET` tests the network between machines of your own"
        )

    def _report(self, **message: object) -> None:
        if self._welcome and self._channel is not None:
            self._channel.send(**message)
        else:
            self._held_back.append(message)

    def _on_message(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if self._over or self._channel is None:
            return
        if kind == "challenge":
            self._channel.send(
                kind="hello",
                node=self._cluster.node_rank,
                hostname=self._cluster.name,
                attempt=self._manifest.attempt_id,
                processes=self._manifest.processes_per_node,
                nonce=self._nonce,
                waited_s=round(self._clock.monotonic() - self._began, 1),
                proof=proof(self._token, "node", message["nonce"]),
            )
        elif kind == "verdict":
            self._channel.send(kind="told")
            self._settle(Outcome(**message))
        elif kind == "welcome":
            if not same(message["proof"], proof(self._token, "hub", self._nonce)):
                self._settle(refused_outcome("the process at node 0's address has a wrong token"))
                return
            self._welcome = True
            self._channel.send(kind="beat", at=self._clock.now())
            for earlier in self._held_back:
                self._channel.send(**earlier)
        elif kind == "turn" and self._welcome:
            self._listener.turn()
        elif kind == "check" and self._welcome:
            self._listener.check(World(**message))
        elif kind == "start" and self._welcome:
            self._listener.start(World(**message))
        elif kind == "restart" and self._welcome:
            self._listener.restart()
        elif kind == "stop" and self._welcome:
            self._stopping = message["state"]
            self._listener.stop(message["state"])

    def _on_closed(self, why: str) -> None:
        self._channel = None
        if self._over:
            return
        if self._stopping in HUNG:
            self._settle(Outcome("LOST", None, "launcher", None, f"node 0 was lost while the attempt stopped: {why}"))
        elif self._stopping is not None:  # machines are taken away after the notice, node 0 perhaps first
            self._settle(Outcome(self._stopping, EXIT_RESUMABLE, "launcher", None, "stopped by SIGTERM"))
        elif self._welcome:
            self._settle(Outcome("LOST", None, "launcher", None, f"node 0 was lost: {why}"))
        else:
            self._why = why

    def _settle(self, outcome: Outcome) -> None:
        if not self._over:
            self._over = True
            self._listener.outcome(outcome)
