"""Ten heads of SageMaker scripts run as they are: here, on the simulator, and in containers; the model is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.sagemaker.test_backend import BUCKET, options, simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture

HEADS = Path(__file__).parent / "heads"
# Script -> the keys of its job, and what its model holds.
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "transformers_trainer": (
        {"hyperparameters": {"epochs": 1, "model_name": "distilbert-base-uncased", "learning_rate": "5e-5"}},
        "distilbert-base-uncased",
    ),
    "pytorch_mnist": ({"hyperparameters": {"batch-size": 128, "lr": 0.05}}, "1,2\n"),
    "sklearn_iris": ({"hyperparameters": {"max_leaf_nodes": 30}}, "30 1"),
    "xgboost_abalone": (
        {"hyperparameters": {"max_depth": 5, "eta": 0.2, "objective": "reg:squarederror"}},
        "squarederror",
    ),
    "tensorflow_mnist": ({"hyperparameters": {"model_dir": "s3://bucket/model", "epochs": 1}}, "saved_model"),
    "hyperparameters_json": (
        {"hyperparameters": {"epochs": 2, "lr": 3e-4, "layers": [2, 4], "name": "a b", "shuffle": True}},
        '"layers": [2, 4]',
    ),
    "training_env": ({"hyperparameters": {"epochs": 4}}, '"interface": '),
    "input_config": ({}, "ok"),
    "every_channel": ({"arg_style": "hf", "hyperparameters": {"fp16": True, "freeze": False}}, '"test": ["one.csv"]'),
    "own_launcher": ({"hyperparameters": {"name": "x", "epochs": 1}}, "again"),
}


@pytest.fixture
def run_heads(tmp_path: Path, home: Path) -> Callable[..., None]:
    """Return a function that runs every head on a backend, fetches the models and compares them."""

    def run(backend: str, inputs: dict[str, str], **given: Any) -> None:
        submitter = Submitter(backend, **given)
        runs = {}
        for name, (changes, _) in JOBS.items():
            job = {
                "name": name.replace("_", "-"),
                "source": str(HEADS),
                "entrypoint": f"{name}.py",
                "inputs": inputs,
                **changes,
            }
            runs[name] = submitter.submit(job)
        for name, submitted in runs.items():
            submitted.wait()
            log = "\n".join(line.text for line in submitted.logs())
            assert submitted.state.value == "SUCCEEDED", f"{name} on {backend}:\n{log}"
            model = submitted.fetch(tmp_path / "out" / name, what=("model",)) / "model" / "model.bin"
            assert JOBS[name][1] in model.read_text(), name

    return run


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """A folder and a single file, as inputs."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.csv").write_text("1,2\n")
    (tmp_path / "one.csv").write_text("3,4\n")
    return {"train": str(tmp_path / "train"), "test": str(tmp_path / "one.csv")}


def test_there_are_ten():
    assert len(JOBS) == 10 and {path.stem for path in HEADS.glob("*.py")} == set(JOBS)


@pytest.mark.usefixtures("census")
def test_they_run_here(run_heads: Callable[..., None], data: dict[str, str]):
    run_heads("local", data)


def test_they_run_on_the_simulator(run_heads: Callable[..., None], simulator: Simulator):  # noqa: F811
    for key, text in (("train/a.csv", b"1,2\n"), ("test/one.csv", b"3,4\n")):
        simulator.call("s3", "put_object", Bucket=BUCKET, Key=key, Body=text)
    inputs = {"train": f"s3://{BUCKET}/train/", "test": f"s3://{BUCKET}/test/one.csv"}
    run_heads("sagemaker", inputs, **options(simulator))


@pytest.mark.docker
@pytest.mark.usefixtures("docker", "census")
def test_they_run_in_containers(run_heads: Callable[..., None], data: dict[str, str]):
    run_heads("sagemaker-local", data)
