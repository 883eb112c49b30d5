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
from tests.conftest import wait_for

HEADS = Path(__file__).parent / "heads"
RESULTS = {  # what the model of each script holds, and a metric that it prints
    "transformers_trainer": ("distilbert-base-uncased", "loss", [0.5]),
    "pytorch_mnist": ("1,2\n", "loss", [1.0, 0.5]),
    "sklearn_iris": ("30 1", "accuracy", [0.93]),
    "xgboost_abalone": ("squarederror", "validation-rmse", [8.5]),
    "tensorflow_mnist": ("saved_model", "accuracy", [0.9]),
    "hyperparameters_json": ('"layers": [2, 4]', "loss", [0.25]),
    "training_env": ('"interface": ', "loss", [0.125]),
    "input_config": ("ok", "loss", [2.5]),
    "every_channel": ('"test": ["one.csv"]', "eval_loss", [0.75]),
    "own_launcher": ("again", "loss", [1.5]),
}
SPOT = "pytorch_mnist"


@pytest.fixture
def run_heads(tmp_path: Path, home: Path) -> Callable[..., None]:
    """Return a function that runs every head on a backend and compares what it printed, its metrics and its model."""

    def run(backend: str, inputs: dict[str, str], meanwhile: Callable[[str], None] | None = None, **given: Any) -> None:
        submitter = Submitter(backend, **given)
        runs = {}
        for name, call in CALLS.items():
            job = convert(HEAD + call)[0]
            assert set(job["inputs"]) == {"train", "test"} and job["entrypoint"] == f"{name}.py"
            job |= {"name": name.replace("_", "-"), "source": str(HEADS)}
            if backend != "sagemaker":
                job = {**job, "inputs": inputs, "resources": {}, "options": {}, "image": None}
            elif name == SPOT:
                job["env"] = {"EPOCH_SECONDS": "600"}  # epoch 2 of its first start never ends
            runs[name] = submitter.submit(job)
        if meanwhile:
            meanwhile(runs[SPOT].attempts[-1].attempt_id)
        for name, submitted in runs.items():
            submitted.wait()
            log = "\n".join(line.text for line in submitted.logs())
            assert submitted.state.value == "SUCCEEDED", f"{name} on {backend}:\n{log}"
            expected, metric, values = RESULTS[name]
            assert [row.value for row in submitted.metrics(metric)] == values, f"{name} on {backend}:\n{log}"
            assert ("Loaded the checkpoint of epoch 1" in log) == (backend == "sagemaker" and name == SPOT)
            model = submitted.fetch(tmp_path / "out" / name, what=("model",)) / "model" / "model.bin"
            assert expected in model.read_text(), name

    return run


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """A folder and a single file, as inputs."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.csv").write_text("1,2\n")
    (tmp_path / "one.csv").write_text("3,4\n")
    return {"train": str(tmp_path / "train"), "test": str(tmp_path / "one.csv")}


def test_there_are_ten():
    assert len(CALLS) == 10 and {path.stem for path in HEADS.glob("*.py")} == set(CALLS) == set(RESULTS)


@pytest.mark.usefixtures("census")
def test_they_run_here(run_heads: Callable[..., None], data: dict[str, str]):
    run_heads("local", data)


def test_they_run_on_the_simulator(run_heads: Callable[..., None], simulator: Simulator):  # noqa: F811
    for key, text in (("train/a.csv", b"1,2\n"), ("test/one.csv", b"3,4\n")):
        simulator.call("s3", "put_object", Bucket=BUCKET, Key=key, Body=text)

    def lose_spot_machine(attempt_id: str) -> None:
        saved = simulator.folder / attempt_id / "algo-1/checkpoints/checkpoint_dir/checkpoint.json"
        wait_for(lambda: saved.exists() and saved.read_text().endswith("}"), "its first epoch")
        simulator.preempt(attempt_id)

    run_heads("sagemaker", {}, lose_spot_machine, **options(simulator))
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
