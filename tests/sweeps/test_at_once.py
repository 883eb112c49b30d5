"""A hundred trials at once on the simulators of SageMaker, Vertex AI and Kubernetes, which run each trial as processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cloudtrain.events import State
from cloudtrain.simulators.sagemaker import server
from cloudtrain.simulators.vertex import server as vertex_server
from cloudtrain.sweeps.sweep import begin
from tests.backends.kubernetes.clusters import ground
from tests.conftest import WAIT_S, wait_for

TRIALS = 100
# Each start leaves a line, and waits until all trials were seen at once.
SCRIPT = """
import argparse, json, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument("--n", type=int)
parser.add_argument("--folder")
given = parser.parse_args()
folder = pathlib.Path(given.folder)
with open(folder / "starts", "a") as file:
    file.write(f"{given.n}\\n")
while not (folder / "gate").exists():
    time.sleep(0.5)
print(json.dumps({"step": 1, "loss": given.n}), flush=True)
"""


@pytest.fixture
def sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    for name, value in server.KEYS.items():
        monkeypatch.setenv(name, value)
    simulator = server.Simulator(tmp_path / "simulated")

    def reset() -> None:
        with urlopen(Request(f"{simulator.url}/moto-api/reset", method="POST"), timeout=WAIT_S):
            pass

    reset()
    simulator.make_bucket("training")
    place = {"role": server.ROLE, "bucket": "training", "region": server.REGION, "image": "any", "client": "boto3"}
    yield {**place, "endpoint": simulator.url}
    reset()
    simulator.close()


@pytest.fixture
def vertex(tmp_path: Path) -> Iterator[dict[str, Any]]:
    simulator = vertex_server.Simulator(tmp_path / "simulated")
    yield {"project": "local", "bucket": "local", "endpoint": simulator.url, "image": "any:1", "client": "rest"}
    simulator.close()


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    with ground(tmp_path / "simulated") as place:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", place.store.url)
        yield {"kubeconfig": str(place.cluster.kubeconfig), "image": "any:1"}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["sagemaker", "vertex", "kubernetes"])
def test_a_hundred_trials_at_once(backend: str, tmp_path: Path, home: Path, request: pytest.FixtureRequest):
    options = request.getfixturevalue(backend)
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    keys = {
        "job": {
            "name": "many", "source": str(project), "entrypoint": "train.py", "options": {backend: options},
            "environment": {"requirements": "none"},
        },
        "target": backend,
        "method": "grid",
        "metric": {"name": "loss"},
        "max_parallel": TRIALS,
        "parameters": {"n": {"values": list(range(TRIALS))}, "folder": {"value": str(project)}},
    }  # fmt: skip
    sweep = begin(keys, project, home=home)

    def started() -> list[str]:
        path = project / "starts"
        return path.read_text().split() if path.exists() else []

    try:
        wait_for(lambda: len(started()) >= TRIALS, "the start of all trials", 1500)
        assert sum(not trial.ended for trial in sweep.trials) == TRIALS
    finally:
        (project / "gate").touch()
        record = sweep.wait(1500)
    assert record.state == "SUCCEEDED", record
    assert sorted(map(int, started())) == list(range(TRIALS)), "none is lost, none was started twice"
    assert {trial.state for trial in sweep.trials} == {State.SUCCEEDED}
    assert sorted(trial.result[0] for trial in sweep.trials if trial.result) == list(range(TRIALS))
    assert sweep.best is not None and sweep.best.params["n"] == 0
