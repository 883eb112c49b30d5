"""The order in which the nodes of an attempt take GPUs of hosts that several jobs share."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import manifest
from launcher.loop import Loop
from launcher.world.channel import Listener
from launcher.world.cluster import Cluster
from launcher.world.coordinator import Coordinator

from cloudtrain.backends.manifest import Manifest
from tests.entrypoints.launcher.world.test_channel import Peer, log_to


class Attempt:
    """Node 0 and the others of an attempt, over real connections; `turns` are those of node 0."""

    def __init__(self, nodes: int, fewest: int | None = None, **more: Any) -> None:
        self.loop, self.turns, self.outcomes = Loop(), [], []
        plan = manifest.decode(Manifest("run", 1, ("train.py",), nodes, 1, fewest, gpus_per_node=1, **more).encode())
        self.attempt_id = plan.attempt_id
        ignore = lambda _: None  # noqa: E731
        listener = Listener(ignore, ignore, self.outcomes.append, log_to([]), lambda: self.turns.append(0))
        cluster = Cluster(nodes=nodes, control_host="127.0.0.1")
        self.coordinator = Coordinator(self.loop, plan, cluster, "", listener, 300.0)
        self.address = self.coordinator.open()
        self.peers: list[Peer] = []

    def join(self, node: int, host: str, answer: str = "welcome", waited_s: float = 0.0, queues: bool = True) -> Peer:
        peer = Peer(self.address, self.coordinator, self.loop)
        self.peers.append(peer)
        hello = {"hostname": host, "attempt": self.attempt_id, "processes": 1, "nonce": "", "proof": ""}
        peer.send("hello", node=node, waited_s=waited_s, **hello)
        peer.expect(answer)
        if answer == "welcome" and queues:
            peer.send("queue", host=host)
        return peer

    def has_turn(self, peer: Peer) -> bool:
        """Whether its turn was announced to a peer, once node 0 has read all that was sent to it."""
        peer.send("beat", at=0.0)
        for _ in range(20):
            self.loop.wait(0.01)
            self.coordinator.tick(False)
        try:
            peer._received += peer.socket.recv(1 << 16)
        except BlockingIOError:
            pass
        return b'"turn"' in peer._received


@pytest.fixture
def attempt():
    made = []

    def make(*arguments, **named):
        made.append(Attempt(*arguments, **named))
        return made[-1]

    yield make
    for each in made:
        each.coordinator.close()
        for peer in each.peers:
            peer.socket.close()


def test_hosts_are_taken_in_the_same_order_whatever_the_ranks(attempt):
    """Two jobs that name the same hosts in another order would each hold what the other waits for."""
    made = attempt(3)
    made.coordinator.queue("host-b")
    last = made.join(1, "host-c")
    assert made.turns == [] and not made.has_turn(last), "not before all hosts are known"
    first = made.join(2, "host-a")
    first.expect("turn")
    assert made.turns == [] and not made.has_turn(last)
    first.send("taken")
    assert not made.has_turn(last) and made.turns == [0]
    made.coordinator.taken()
    last.expect("turn")


def test_a_role_without_gpus_waits_for_none(attempt):
    service = {"name": "judge", "nodes": 1, "processes_per_node": 1, "gpus_per_node": 0, "after": []}
    made = attempt(3, roles=[{"name": "trainer", "nodes": 2, "after": []}, service], version=4)
    made.coordinator.queue("host-b")
    made.join(2, "host-a", queues=False)
    assert made.turns == []
    last = made.join(1, "host-c")
    assert not made.has_turn(last) and made.turns == [0]


def test_a_role_on_another_roles_machine_asks_for_no_turn_of_its_own(attempt):
    service = {"name": "server", "nodes": 1, "processes_per_node": 1, "gpus_per_node": 2, "after": []}
    trainer = {"name": "trainer", "nodes": 1, "after": []}
    made = attempt(2, roles=[trainer, {**service, "colocate": "trainer"}], version=4)
    made.coordinator.queue("host-a")
    assert made.turns == []
    made.join(1, "host-a", queues=False)
    assert made.turns == [0]


def test_a_node_that_comes_after_the_first_turn_is_left_out(attempt):
    made = attempt(3, fewest=2)
    made.coordinator.queue("host-b")
    other = made.join(1, "host-c", waited_s=300.0)  # the third one has had its time
    assert not made.has_turn(other) and made.turns == [0]
    refused = made.join(2, "host-a", answer="verdict").expect("verdict")
    assert "has started without it" in refused["reason"]


def test_two_nodes_on_one_machine_are_refused(attempt):
    made = attempt(2)
    made.coordinator.queue("host-a")
    peer = made.join(1, "host-a")
    assert "the same machine as node 0" in peer.expect("verdict")["reason"]
    assert made.outcomes[0].exit_code == 78
