"""Ten SageMaker scripts run as they are, their estimator call converted: here, on the simulator, and in containers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.sagemaker import docker as docker_engine
from cloudtrain.backends.sagemaker.request import build_request
from cloudtrain.cli import main
from cloudtrain.job.job import Job
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.sagemaker.notebooks import CALLS, HEAD
from tests.backends.sagemaker.test_backend import BUCKET, options, simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_request import ACCOUNT, SHA
from tests.backends.sagemaker.test_sdk import ask
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


def convert_call(folder: Path, name: str) -> dict[str, Any]:
    """Return the job that `cloudtrain init --from` writes of one notebook's call."""
    (folder / f"{name}.py").write_text(HEAD + CALLS[name])
    assert main(["init", "--from", str(folder / f"{name}.py"), "-o", str(folder / "job.yaml"), "--force"]) == 0
    job = dict(yaml.safe_load((folder / "job.yaml").read_text()))
    assert job.pop("target") == "sagemaker"
    return job


@pytest.fixture
def run_heads(tmp_path: Path, home: Path) -> Callable[..., None]:
    """Return a function that runs every head on a backend and compares what it printed, its metrics and its model.

    `lose_machine` ends the first attempt of one run when it has saved its first epoch; that run resumes.
    """

    def run(backend: str, inputs: dict[str, str], lose_machine: Callable[[Run], None] | None = None, **given: Any):
        submitter = Submitter(backend, **given)
        runs = {}
        for name in CALLS:
            job = convert_call(tmp_path, name)
            assert set(job["inputs"]) == {"train", "test"} and job["entrypoint"] == f"{name}.py"
            job |= {"name": name.replace("_", "-"), "source": str(HEADS)}
            if backend != "sagemaker":
                job = {**job, "inputs": inputs, "resources": {}, "options": {}, "image": None}
            if lose_machine and name == SPOT:  # epoch 2 of its first start never ends
                job |= {"env": {"EPOCH_SECONDS": "600"}, "retry": {"max_attempts": 2}}
            runs[name] = submitter.submit(job)
        if lose_machine:
            lose_machine(runs[SPOT])
        for name, submitted in runs.items():
            submitted.wait()
            log = "\n".join(line.text for line in submitted.logs())
            assert submitted.state.value == "SUCCEEDED", f"{name} on {backend}:\n{log}"
            expected, metric, values = RESULTS[name]
            assert [row.value for row in submitted.metrics(metric)] == values, f"{name} on {backend}:\n{log}"
            assert ("Loaded the checkpoint of epoch 1" in log) == (lose_machine is not None and name == SPOT)
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


def test_they_run_on_the_simulator(run_heads: Callable[..., None], simulator: Simulator, tmp_path: Path):  # noqa: F811
    for key, text in (("train/a.csv", b"1,2\n"), ("test/one.csv", b"3,4\n")):
        simulator.call("s3", "put_object", Bucket=BUCKET, Key=key, Body=text)

    def lose_spot_machine(run: Run) -> None:
        attempt_id = run.attempts[-1].attempt_id
        wait_for_epoch(simulator.folder / attempt_id / "algo-1")
        simulator.preempt(attempt_id)

    run_heads("sagemaker", {}, lose_spot_machine, **options(simulator))
    described = {job.name.rpartition("-")[0]: job.describe()["HyperParameters"] for job in simulator.jobs.values()}
    assert len(described) == 10
    for name, sent in described.items():
        job = convert_call(tmp_path, next(each for each in CALLS if name.startswith(each.replace("_", "-"))))
        written = {key: json.dumps(value) for key, value in job.get("hyperparameters", {}).items()}
        assert shown(sent) == written, name


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "names", [[SPOT, "tensorflow_mnist"], pytest.param(list(CALLS), marks=pytest.mark.long)], ids=["two", "ten"]
)
def test_moto_describes_the_hyperparameters_of_the_notebook_by_either_client(
    names: list[str], sdk: Path, tmp_path: Path
):
    """The oracle is the notebook itself: the `fit` of its own estimator, of sagemaker 2.257.7."""
    given = {}
    for name in names:
        job = convert_call(tmp_path, name) | {"source": str(HEADS)}
        chosen = {**ACCOUNT, **job.get("options", {}).get("sagemaker", {})}
        job["options"] = {"sagemaker": chosen}
        built = build_request(Job.from_dict(job), name.replace("_", "-"), 1, SHA, chosen)
        assert built.problems == (), name
        given[name] = [built.request, HEAD + CALLS[name]]
    (tmp_path / "jobs.json").write_text(json.dumps(given))
    answers = ask(sdk, "describe", tmp_path / "jobs.json")
    assert set(answers) == set(names)
    for name, described in answers.items():
        by_boto3, by_sdk, by_notebook = map(shown, described)
        if name == SPOT:  # on every target the run's own folder
            by_notebook["checkpoint-path"] = '"{checkpoint_dir}"'
        assert by_boto3 == by_sdk == by_notebook, name


def shown(hyperparameters: dict[str, str]) -> dict[str, str]:
    own = ("sagemaker_", "ct_manifest_")
    return {key: text for key, text in hyperparameters.items() if not key.startswith(own)}


@pytest.mark.docker
@pytest.mark.usefixtures("docker", "census")
def test_they_run_in_containers(run_heads: Callable[..., None], data: dict[str, str]):
    def lose_machine(run: Run) -> None:  # local mode has no spot: container and keeper are killed as a machine goes
        folder = Path(str(run.attempts[-1].handle))
        wait_for_epoch(folder.parent)
        # What its keeper has not copied yet is lost with the machine.
        wait_for(lambda: any("Train Epoch: 1" in line.text for line in run.logs()), "the line of its first epoch")
        os.kill(json.loads((folder / "status.json").read_text())["pid"], signal.SIGKILL)
        docker_engine.remove_all(folder)

    run_heads("sagemaker-local", data, lose_machine)


def wait_for_epoch(folder: Path) -> None:
    saved = folder / "checkpoints/checkpoint_dir/checkpoint.json"
    wait_for(lambda: saved.exists() and saved.read_text().endswith("}"), "its first epoch")
