"""Silence on the control channel: what counts as a lost node, and what does not."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

from launcher import manifest
from launcher.loop import Loop
from launcher.world import channel as channels
from launcher.world import coordinator as coordinators
from launcher.world.channel import LOOK_S, Channel, Listener
from launcher.world.cluster import Cluster
from launcher.world.coordinator import Coordinator
from launcher.world.outcome import Outcome

from cloudtrain.backends.manifest import Manifest
from tests.conftest import wait_for


def test_who_stood_still_itself_has_not_heard_a_silence(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(channels, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        loop = Loop()
        channel = Channel(loop, server.accept()[0], lambda _: None, lambda _: None)
        for _ in range(5):
            now[0] += 1.0
            channel.look()
        assert channel.look() == 5.0
        now[0] += 1000.0
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
    listener = Listener(lambda _: None, lambda _: None, outcomes.append)
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
