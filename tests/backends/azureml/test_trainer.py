"""Jobs that run on the simulated workspace: the example of two nodes learns what it learns here, and datastores are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import events
from cloudtrain.backends.api import Backend
from cloudtrain.backends.azureml.backend import AzuremlBackend
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.events import State, Status
from cloudtrain.job import targets
from cloudtrain.job.job import Job
from cloudtrain.simulators.azureml.server import Simulator
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for

EXAMPLE = Path(__file__).parents[3] / "examples" / "ddp" / "job.yaml"
FEWER = ("hyperparameters.max_steps=12", "hyperparameters.logging_steps=1", "hyperparameters.max_train_bytes=60000")


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    made = Simulator(tmp_path / "simulator")
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def ended(backend: Backend, handle: str) -> Status:
    def final() -> Status | None:
        status = backend.status(handle)
        return status if status.state.final else None

    return wait_for(final, "the end of the job", 280)


def losses(backend: Backend, job: Job, bundle: Bundle) -> dict[int, Any]:
    handle = backend.submit(backend.plan(job, bundle, "run"), bundle)
    status = ended(backend, handle)
    assert status.state is State.SUCCEEDED, status
    found = [event for line in backend.logs(handle) if (event := events.parse(line.text))]
    worlds = [data for kind, data in found if kind == "world" and "node_rank" in data]
    assert {(world["world_size"], world["node_rank"]) for world in worlds} == {(2, 0), (2, 1)}
    return {data["step"]: data["loss"] for kind, data in found if kind == "metric" and "loss" in data}


@pytest.mark.train
@pytest.mark.timeout(900)
def test_the_example_of_two_nodes_learns_what_it_learns_here(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    job = targets.resolve(EXAMPLE, FEWER).job
    assert job.num_nodes == 2
    bundle = Bundle.make(Path(job.source), tmp_path / "bundles", trainer=True)
    here = losses(LocalBackend({}, tmp_path / "local"), job, bundle)
    there = losses(AzuremlBackend(simulator.options, tmp_path / "work"), job.replace(image="any:1"), bundle)
    assert sorted(here) == list(range(1, 13)) and there == here


SCRIPT = """
import os
from pathlib import Path
here = {name: os.environ["CLOUDTRAIN_INPUT_" + name] for name in ("TRAIN_SET", "LABELS", "WEB")}
assert Path(here["TRAIN_SET"], "deep", "a.txt").read_text() == "words" and Path(here["LABELS"]).read_text() == "1,2"
assert here["WEB"] == "azureml://datastores/workspaceblobstore/paths/data/web"
state = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "state")
rank = os.environ["RANK"]
if rank == "0":
    print("begins with", state.read_text() if state.exists() else "nothing")
    state.write_text("one step")
Path(os.environ["CLOUDTRAIN_MODEL_DIR"], f"w{rank}").write_text("learnt")
"""


def test_a_job_reads_datastores_and_writes_to_one(simulator: Simulator, tmp_path: Path):
    for name, text in {"train/deep/a.txt": "words", "labels.csv": "1,2", "trainer/x": "no"}.items():
        simulator.blobs.write("azureml-blobstore", f"data/{name}", text.encode())
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "script.py").write_text(SCRIPT)
    data = "azureml://datastores/workspaceblobstore/paths/data"
    inputs = {"train-set": f"{data}/train", "labels": {"uri": f"{data}/labels.csv", "mode": "mount"},
              "web": {"uri": f"{data}/web", "mode": "stream"}}  # fmt: skip
    keys = {"name": "a", "source": str(tmp_path / "source"), "entrypoint": "script.py", "image": "any:1", "num_nodes": 2,
            "inputs": inputs, "output": f"{data}/runs", "environment": {"requirements": "none"},
            "distributed_env": "always"}  # fmt: skip
    job, backend = Job.from_dict(keys), AzuremlBackend(simulator.options, tmp_path / "work")
    bundle = Bundle.make(tmp_path / "source", tmp_path / "bundles")
    said = []
    for attempt in (1, 2):
        handle = backend.submit(backend.plan(job, bundle, "run", attempt), bundle)
        assert ended(backend, handle).state is State.SUCCEEDED
        said.append({line.text for line in backend.logs(handle) if "begins with" in line.text})
    assert said == [{"begins with nothing"}, {"begins with one step"}]
    into = backend.fetch(handle, tmp_path / "fetched")
    assert {path.name for path in (into / "model").iterdir()} == {"w0", "w1"}
    assert "data/runs/run/model/w1" in simulator.blobs.objects("azureml-blobstore")
