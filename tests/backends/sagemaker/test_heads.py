"""Ten SageMaker scripts run as they are, their estimator call converted: here, on the simulator, and in containers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.job.estimator_call import convert
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.sagemaker.notebooks import CALLS, HEAD
from tests.backends.sagemaker.test_backend import BUCKET, options, simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture

HEADS = Path(__file__).parent / "heads"
MODELS = {  # what the model of each script holds
    "transformers_trainer": "distilbert-base-uncased",
    "pytorch_mnist": "1,2\n",
    "sklearn_iris": "30 1",
    "xgboost_abalone": "squarederror",
    "tensorflow_mnist": "saved_model",
    "hyperparameters_json": '"layers": [2, 4]',
    "training_env": '"interface": ',
    "input_config": "ok",
    "every_channel": '"test": ["one.csv"]',
    "own_launcher": "again",
}


@pytest.fixture
def run_heads(tmp_path: Path, home: Path) -> Callable[..., None]:
    """Return a function that runs every head on a backend, fetches the models and compares them."""

    def run(backend: str, inputs: dict[str, str], **given: Any) -> None:
        submitter = Submitter(backend, **given)
        runs = {}
        for name, call in CALLS.items():
            job = convert(HEAD + call)[0]
            assert set(job["inputs"]) == {"train", "test"} and job["entrypoint"] == f"{name}.py"
            job |= {"name": name.replace("_", "-"), "source": str(HEADS)}
            if backend != "sagemaker":
                job = {**job, "inputs": inputs, "resources": {}, "options": {}, "image": None}
            runs[name] = submitter.submit(job)
        for name, submitted in runs.items():
            submitted.wait()
            log = "\n".join(line.text for line in submitted.logs())
            assert submitted.state.value == "SUCCEEDED", f"{name} on {backend}:\n{log}"
            model = submitted.fetch(tmp_path / "out" / name, what=("model",)) / "model" / "model.bin"
            assert MODELS[name] in model.read_text(), name

    return run


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """A folder and a single file, as inputs."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.csv").write_text("1,2\n")
    (tmp_path / "one.csv").write_text("3,4\n")
    return {"train": str(tmp_path / "train"), "test": str(tmp_path / "one.csv")}


def test_there_are_ten():
    assert len(CALLS) == 10 and {path.stem for path in HEADS.glob("*.py")} == set(CALLS) == set(MODELS)


@pytest.mark.usefixtures("census")
def test_they_run_here(run_heads: Callable[..., None], data: dict[str, str]):
    run_heads("local", data)


def test_they_run_on_the_simulator(run_heads: Callable[..., None], simulator: Simulator):  # noqa: F811
    for key, text in (("train/a.csv", b"1,2\n"), ("test/one.csv", b"3,4\n")):
        simulator.call("s3", "put_object", Bucket=BUCKET, Key=key, Body=text)
    run_heads("sagemaker", {}, **options(simulator))
    for name, call in CALLS.items():
        (described,) = [
            job.describe() for job in simulator.jobs.values() if job.name.startswith(name.replace("_", "-"))
        ]
        written = {key: json.dumps(value) for key, value in convert(HEAD + call)[0].get("hyperparameters", {}).items()}
        own = ("sagemaker_", "ct_manifest_")
        shown = {key: text for key, text in described["HyperParameters"].items() if not key.startswith(own)}
        assert shown == written, "as the estimator itself would send them"


@pytest.mark.docker
@pytest.mark.usefixtures("docker", "census")
def test_they_run_in_containers(run_heads: Callable[..., None], data: dict[str, str]):
    run_heads("sagemaker-local", data)
