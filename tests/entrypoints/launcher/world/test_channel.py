"""Silence on the control channel: what counts as a lost node, and what does not."""

from __future__ import annotations

import json
import socket
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from launcher import manifest
from launcher.loop import Loop
from launcher.world import coordinator as coordinators
from launcher.world import worker as workers
from launcher.world.channel import LOOK_S, Channel, Listener
from launcher.world.cluster import Cluster
from launcher.world.coordinator import Coordinator
from launcher.world.outcome import Outcome, missing_outcome

from cloudtrain.backends.manifest import Manifest
from cloudtrain.testing.clock import VirtualClock
from tests.conftest import wait_for


def log_to(lines: list[str]) -> SimpleNamespace:
    """Return what a node's log is to the channel: lines go to a list."""
    return SimpleNamespace(say=lines.append, warn=lines.append)


def test_who_stood_still_itself_has_not_heard_a_silence():
    clock = VirtualClock()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        loop = Loop(clock)
        channel = Channel(loop, server.accept()[0], lambda _: None, lambda _: None)
        for _ in range(5):
            clock.sleep(1.0)
            channel.look()
        assert channel.look() == 5.0
        clock.sleep(1000.0)
        assert channel.look() == 5.0 + LOOK_S
        far.sendall(b"{}\n")
        loop.wait(60)
        assert channel.look() == 0.0
        channel.close()


class Peer:
    """A worker by hand, over a real connection."""

    def __init__(self, address: tuple[str, int], coordinator: Coordinator, loop: Loop) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setblocking(False)
        self._coordinator, self._loop, self._received = coordinator, loop, b""

    def send(self, kind: str, **more: object) -> None:
        self.socket.sendall(json.dumps({"kind": kind, **more}).encode() + b"\n")

    def expect(self, kind: str) -> dict:
        def message() -> dict | None:
            self._loop.wait(0.01)
            self._coordinator.tick(True)
            try:
                self._received += self.socket.recv(1 << 16)
            except BlockingIOError:
                pass
            *lines, _ = self._received.split(b"\n")
            return next((each for each in map(json.loads, lines) if each["kind"] == kind), None)

        return wait_for(message, kind)


def test_a_node_that_uploads_its_results_in_silence_is_waited_for(monkeypatch):
    """A third node that is slow to hear the outcome keeps node 0 looking; the second one has heard it, and uploads."""
    loop, outcomes = Loop(), []
    plan = manifest.decode(Manifest("run", 1, ("train.py",), 3, 1).encode())
    listener = Listener(lambda _: None, lambda _: None, outcomes.append, log_to([]))
    coordinator = Coordinator(loop, plan, Cluster(nodes=3, control_host="127.0.0.1"), "", listener, 300.0)
    address = coordinator.open()
    peers = [Peer(address, coordinator, loop) for _ in range(2)]
    for node, peer in enumerate(peers, start=1):
        hello = {"hostname": f"node-{node}", "attempt": plan.attempt_id, "processes": 1, "nonce": "", "proof": ""}
        peer.send("hello", node=node, **hello)
        peer.expect("welcome")
        peer.send("ready")
    coordinator.ready()
    for peer in peers:
        peer.expect("start")
        peer.send("end")
    coordinator.end()
    for peer in peers:
        peer.expect("verdict")
    assert outcomes == [Outcome("SUCCEEDED", 0, "script")]
    peers[0].send("told")
    monkeypatch.setattr(coordinators, "SILENCE_S", -1.0)  # whoever is looked at is silent for too long
    for _ in range(20):
        loop.wait(0.01)
        coordinator.tick(True)
    peers[1].send("told")
    wait_for(lambda: loop.wait(0.01) or coordinator.settled, "both to have heard it")
    assert not coordinator.all_finished, "both still upload"
    for peer in peers:
        peer.send("home")
    wait_for(lambda: loop.wait(0.01) or coordinator.all_finished, "both to have finished")
    coordinator.close()
    for peer in peers:
        peer.socket.close()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (socket.gaierror(-2, "Name or service not known"), ("PREEMPTED", 75)),
        (TimeoutError("timed out"), ("FAILED", 78)),
    ],
)
def test_a_node_asks_for_node_0_seldom_and_gives_up_in_time(monkeypatch, error, outcome):
    """A name that DNS does not know is a machine that has not come: no refusal."""
    clock, asked, outcomes = VirtualClock(), [], []

    def refuse(address, timeout):
        asked.append(clock.monotonic())
        raise error

    monkeypatch.setattr(workers.socket, "create_connection", refuse)
    listener = Listener(lambda _: None, lambda _: None, outcomes.append, log_to([]))
    plan = manifest.decode(Manifest("run", 1, ("train.py",), 2, 1).encode())
    worker = workers.Worker(Loop(clock), plan, Cluster(nodes=2, node_rank=1, control_host="a.b"), "", listener, 300.0)
    began = clock.monotonic()
    worker.open()
    while not outcomes:
        clock.sleep(worker.patience_s)
        worker.tick(False)
    assert clock.monotonic() - began < 320 and 60 <= len(asked) <= 90, "ten a second were asked before"
    assert (outcomes[0].state, outcomes[0].exit_code) == outcome


def ask_in_vain(count: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """Return when which of many nodes asks for node 0, which does not come."""
    clock, asked, outcomes = VirtualClock(), [], []
    began = clock.monotonic()

    def refuse(address, timeout):
        asked.append((clock.monotonic() - began, address[0]))
        raise OSError("refused")

    monkeypatch.setattr(workers.socket, "create_connection", refuse)
    listener = Listener(lambda _: None, lambda _: None, outcomes.append, log_to([]))
    plan = manifest.decode(Manifest("run", 1, ("train.py",), count, 1).encode())
    places = [Cluster(nodes=count, node_rank=rank, control_host=f"node-0-as-{rank}-sees") for rank in range(1, count)]
    nodes = [workers.Worker(Loop(clock), plan, place, "", listener, 1800.0) for place in places]
    while clock.monotonic() < began + seconds:
        for node in nodes:
            node.tick(False)
        clock.sleep(0.05)
    assert not outcomes
    return asked


def test_each_of_256_nodes_asks_for_node_0_at_most_once_in_5_s(monkeypatch):
    asked = ask_in_vain(256, 40, monkeypatch)
    for name in {name for _, name in asked}:
        moments = [moment for moment, each in asked if each == name]
        assert len(moments) >= 4 and all(after - before >= 5 for before, after in pairwise(moments)), moments


def test_64_nodes_do_not_ask_together(monkeypatch):
    """63 nodes that wait for node 0 ask about 13 times a second together; that they began together is soon forgotten."""
    later = Counter(int(moment) for moment, _ in ask_in_vain(64, 120, monkeypatch) if moment >= 60)
    assert len(later) >= 59
    assert 9 <= sum(later.values()) / 60 <= 17 and max(later.values()) <= 40, later


def test_node_0_says_once_a_minute_who_is_missing():
    """A second node has waited for 100 s when it finds node 0: so long less is waited for the third."""
    clock, said, outcomes = VirtualClock(), [], []
    plan = manifest.decode(Manifest("run", 1, ("train.py",), 3, 1).encode())
    listener = Listener(lambda _: None, lambda _: None, outcomes.append, log_to(said))
    loop = Loop(clock)
    coordinator = Coordinator(loop, plan, Cluster(nodes=3, control_host="127.0.0.1"), "", listener, 300.0)
    peer = Peer(coordinator.open(), coordinator, loop)
    hello = {
        "hostname": "node-1",
        "attempt": plan.attempt_id,
        "processes": 1,
        "nonce": "",
        "proof": "",
        "waited_s": 100,
    }
    peer.send("hello", node=1, **hello)
    peer.expect("welcome")
    for _ in range(210):
        clock.sleep(1)
        peer.send("beat", at=clock.now())
        loop.wait(60)  # until it has come
        coordinator.tick(False)
    assert [line.partition(" more")[0] for line in said] == [
        "2 of 3 nodes have joined; waiting 140 s",
        "2 of 3 nodes have joined; waiting 80 s",
        "2 of 3 nodes have joined; waiting 20 s",
    ]
    assert outcomes == [missing_outcome("2 of 3 nodes joined within 300 s; missing: 2")]
    coordinator.close()
    peer.socket.close()


def test_the_wait_of_a_node_that_came_before_node_0_counts():
    """It has waited for 100 s when it finds node 0, and says so."""
    early, late, said = VirtualClock(), VirtualClock(), []
    plan, loop = manifest.decode(Manifest("run", 1, ("train.py",), 3, 1).encode()), Loop(late)
    listener = Listener(lambda _: None, lambda _: None, lambda _: None, log_to(said))
    coordinator = Coordinator(loop, plan, Cluster(nodes=3, control_host="127.0.0.1"), "", listener, 300.0)
    host, port = coordinator.open()
    place = Cluster(nodes=3, node_rank=1, control_host=host, control_port=port)
    worker = workers.Worker(waits := Loop(early), plan, place, "", listener, 300.0)
    early.sleep(100)
    worker.open()
    wait_for(lambda: worker.tick(False) or waits.wait(0.01) or loop.wait(0.01) or worker._welcome, "node 0's welcome")
    late.sleep(60)
    coordinator.tick(False)
    assert [line.partition(" more")[0] for line in said] == ["2 of 3 nodes have joined; waiting 140 s"]
    worker.close()
    coordinator.close()
