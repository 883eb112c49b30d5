"""SageMaker's variables are those that the real sagemaker-training 5.1.4 sets for the same job, by a record of its answers.

The record is toolkit_env.json. CLOUDTRAIN_TOOLKIT_PYTHON, a Python that has the package, writes it anew; a test in
containers compares it with the package in the image of `make image-toolkit`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "entrypoints"))  # as tests/entrypoints/conftest.py does
from launcher import manifest as manifests  # noqa: E402
from launcher.prepare import gpus  # noqa: E402
from launcher.prepare.node import make_folders  # noqa: E402
from launcher.prepare.sagemaker_env import SageMakerEnv  # noqa: E402
from launcher.world import cluster as clusters  # noqa: E402
from launcher.world.channel import World  # noqa: E402

from cloudtrain.backends.manifest import Manifest  # noqa: E402
from cloudtrain.backends.sagemaker import docker as docker_engine  # noqa: E402
from cloudtrain.backends.sagemaker.local_request import IMAGE, build_request  # noqa: E402
from cloudtrain.job.arguments import flat  # noqa: E402
from cloudtrain.job.job import Job  # noqa: E402
from tests.backends.sagemaker.test_local_docker import docker  # noqa: E402, F401 - a fixture

HERE = Path(__file__).parent
RECORD = HERE / "toolkit_env.json"
SOURCE = "/opt/ml/cloudtrain"
HYPERPARAMETERS = {
    "lr": 3e-4, "epochs": 3, "fp16": True, "bf16": False, "seed": None, "model-name": "a b", "layers": [2, 4], "x": "1",
    "note": "naïve \"quoted\"", "optim": {"name": "adamw", "betas": [0.9, 0.95]}, "sagemaker_own": 1, "json": '{"a": [1]}',
}  # fmt: skip
TYPE = "ml.g5.xlarge"


def resources(hosts: list[str], **more: object) -> dict:
    return {"current_host": hosts[-1], "hosts": hosts, "network_interface_name": "eth0", **more}


def groups(hosts: list[str]) -> dict:
    group = {"instance_group_name": "homogeneousCluster", "instance_type": TYPE, "hosts": hosts}
    return {"current_instance_type": TYPE, "current_group_name": "homogeneousCluster", "instance_groups": [group]}


TWO = ["algo-1", "algo-2"]
CASES: dict[str, tuple[dict, dict, list[str]]] = {  # the job, resourceconfig.json, channels
    "two hosts": ({"hyperparameters": HYPERPARAMETERS}, resources(TWO, **groups(TWO)), ["train", "test-data"]),
    "local mode": ({}, resources(["algo-1"]), []),
    "a module": ({"entrypoint": "-m pkg.train"}, resources(["algo-1"], current_instance_type="local"), ["training"]),
    "topology": ({"args": ["--more"]}, resources(TWO, topology=[{"hostName": "algo-1"}], **groups(TWO)), []),
}


def config_files(name: str) -> dict:
    """Return the files that SageMaker makes of a case, as the toolkit reads them of a job of its own."""
    changes, resource_config, channels = CASES[name]
    job = Job(**{"entrypoint": "train.py", **changes})
    given = flat(changes.get("hyperparameters", {}))  # nested ones are dotted keys of a job
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    program = str(job.entrypoint).removeprefix("-m ")
    return {
        "hyperparameters": {**texts, "sagemaker_program": program, "sagemaker_submit_directory": SOURCE},
        "resourceconfig": resource_config,
        "inputdataconfig": {channel: {"TrainingInputMode": "File"} for channel in channels},
    }


def ask_toolkit(command: list[str], base: str) -> dict[str, dict[str, str]]:
    """Return what the toolkit sets in every case; `command` runs with_the_toolkit.py, which makes the folder `base`."""
    answers = {}
    for name in CASES:
        given = json.dumps({"base": f"{base}/{name.replace(' ', '-')}", "config": config_files(name)})
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers[name] = normal(json.loads(done.stdout.splitlines()[-1]), json.loads(given)["base"])
    return answers


def normal(variables: dict[str, str], base: str) -> dict[str, str]:
    """Replace what differs between machines: the folder, and the number of processors."""
    training = json.loads(variables["SM_TRAINING_ENV"])
    training["num_cpus"] = 1
    # Hyperparameters with the prefix sagemaker_ are the SDK's; of a person's own the launcher knows no more.
    training["additional_framework_parameters"] = {}
    made = {
        **variables,
        "SM_NUM_CPUS": "1",
        "SM_TRAINING_ENV": json.dumps(training, sort_keys=True),
        "SM_FRAMEWORK_PARAMS": "{}",
    }
    return {name: text.replace(base, "/opt/ml") for name, text in made.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_variable_is_the_toolkits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if python := os.environ.get("CLOUDTRAIN_TOOLKIT_PYTHON"):
        answers = ask_toolkit([python, str(HERE / "with_the_toolkit.py")], str(tmp_path / "toolkit"))
        RECORD.write_text(json.dumps(answers, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    changes, resource_config, _ = CASES[name]
    monkeypatch.setattr(gpus, "visible", list)
    files = config_files(name)
    files["inputdataconfig"] |= {"cloudtrain": {"TrainingInputMode": "File"}}  # the channel of our bundle
    base = str(tmp_path / "ml")
    config = Path(base, "input", "config")
    config.mkdir(parents=True)
    for file, content in files.items():
        (config / f"{file}.json").write_text(json.dumps(content))
    job = Job(**{"entrypoint": "train.py", "num_nodes": len(resource_config["hosts"]), **changes})
    built = build_request(job, "near", 1, "0" * 64, {}, tmp_path)
    manifest = manifests.decode(Manifest.from_dict(built.manifest.to_dict()).encode())
    environ = {"SAGEMAKER_BASE_DIR": base, "TRAINING_JOB_NAME": "near-a1", "AWS_REGION": "eu-west-1"}
    cluster = clusters.resolve(environ, json.dumps(resource_config))
    folders = make_folders(manifest, cluster, environ, SOURCE)
    made = SageMakerEnv(manifest, cluster, environ, folders, {}, "", SOURCE, str)
    variables = made.variables(World(cluster.nodes, cluster.node_rank, cluster.master_host, 1, cluster.hosts))
    others = {key: variables.pop(key) for key in list(variables) if not key.startswith("SM_")}
    assert normal(variables, base) == json.loads(RECORD.read_text())[name]
    assert others == {  # the toolkit sets them in its own process
        "CURRENT_HOST": resource_config["current_host"],
        "SAGEMAKER_JOB_NAME": "near-a1",
        "SAGEMAKER_REGION": "eu-west-1",
    }


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_the_record_is_what_the_toolkit_says():
    image = f"{IMAGE}-toolkit"
    if why := docker_engine.why_unavailable(image):  # it is built where Python is the image's, 3.11
        assert "toolkit" not in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","), why
        pytest.skip(f"{why}: make image-toolkit")
    script = (HERE / "with_the_toolkit.py").read_text()
    command = ["docker", "run", "--rm", "-i", "--network", "none", "--entrypoint", "python3", image, "-c", script]
    assert ask_toolkit(command, "/tmp/toolkit") == json.loads(RECORD.read_text())
