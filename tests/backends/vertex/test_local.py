"""The backend vertex-local: the contract suite over a simulator of its own, two nodes, a real collective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.backends.vertex.local import VertexLocalBackend
from cloudtrain.errors import BadRequest
from cloudtrain.nodes.process import Process
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators import replicas
from cloudtrain.testing.contract import BackendContract
from tests.conftest import wait_for


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory):
    """One simulator for all tests of this file; it cancel requested afterwards, and has to."""
    home = tmp_path_factory.mktemp("vertex-local")
    yield home
    end_simulator(home)


def end_simulator(home: Path) -> None:
    """Ask a home's simulator to end, and wait until it has."""
    server_file = home / "simulators" / "vertex" / "server.json"
    if server_file.exists():
        process = Process.parse(json.loads(server_file.read_text())["process"])
        server_file.unlink()
        wait_for(lambda: not process.alive, "the simulator's end")
    assert [pid for pid, place in replicas.list_processes() if place.startswith(str(home))] == []


class TestVertexLocal(BackendContract):
    @pytest.fixture
    def connect(self, shared_home: Path):
        self.home = shared_home
        return lambda: VertexLocalBackend({}, shared_home / "runs")

    def leftovers(self, handle: str) -> list[str]:
        number = handle.rpartition("/")[2]
        return [f"{pid} in {place}" for pid, place in replicas.list_processes() if f"/{number}/" in place]


def test_a_key_names_the_same_job_after_the_history_is_lost(shared_home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    job = {"name": "keyed", "source": str(tmp_path), "entrypoint": "train.py", "args": ["1"]}
    job["environment"] = {"requirements": "none"}
    first = Submitter("vertex-local", home=shared_home, watch=False).submit(job, key="k")
    first.wait(120)
    database = first.store.database.path
    for path in database.parent.glob("history*"):  # the journal too: it knows the run
        if path.is_file():
            path.unlink()
    submitter = Submitter("vertex-local", home=shared_home, watch=False)
    with pytest.raises(BadRequest, match="the job's digest"):
        submitter.submit({**job, "args": ["2"]}, key="k")
    again = submitter.submit(job, key="k")
    assert again.run_id == first.run_id and again.adopted and again.attempts[0].handle
