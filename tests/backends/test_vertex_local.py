"""The backend vertex-local: the contract suite over a simulator of its own, two nodes, a real collective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.vertex_local import VertexLocalBackend
from cloudtrain.process import Process
from cloudtrain.simulators import replicas
from cloudtrain.testing.contract import BackendContract
from tests.conftest import wait_for


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory):
    """One simulator for all tests of this file; it is asked to end afterwards, and has to."""
    home = tmp_path_factory.mktemp("vertex-local")
    yield home
    folder = home / "simulators" / "vertex"
    known = folder / "server.json"
    if known.exists():
        process = Process.parse(json.loads(known.read_text())["process"])
        known.unlink()
        wait_for(lambda: not process.alive, "the simulator's end")
    assert [pid for pid, place in replicas.marked() if place.startswith(str(home))] == []


class TestVertexLocal(BackendContract):
    @pytest.fixture
    def connect(self, shared_home: Path):
        self.home = shared_home
        return lambda: VertexLocalBackend({}, shared_home / "runs")

    def leftovers(self, handle: str) -> list[str]:
        number = handle.rpartition("/")[2]
        return [f"{pid} in {place}" for pid, place in replicas.marked() if f"/{number}/" in place]
