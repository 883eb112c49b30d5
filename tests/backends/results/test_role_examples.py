"""Each example of several programs, and that of Ray, runs from its one job file on every target."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.sagemaker.local_request import IMAGE
from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from tests.backends.results.places import open_place
from tests.backends.results.test_results import PLACES
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture
from tests.conftest import WAIT_S
from tests.lab.environments import make_environment
from tests.test_examples import EXAMPLES, SHOWN

ROLES = ("train-eval", "grpo")
RAY = ("ray[default,train]==2.60.0", "torch==2.13.0+cpu")  # in an environment of their own
SAMPLE = {("kubernetes", "train-eval")}  # test_examples.py runs them on `local`
DOCKER = {"sagemaker-local"}


def ray_image(python: Path, folder: Path) -> str:
    """Return the name of an image with Ray beside what the shared trainer's image has."""
    packages = next(python.parents[1].glob("lib/python3*/site-packages"))
    (folder / "packages").mkdir()
    for each in packages.iterdir():
        if each.is_dir() and not each.name.startswith(("torch", "functorch")):
            shutil.copytree(each, folder / "packages" / each.name)
        elif each.suffix in (".py", ".so"):
            shutil.copy(each, folder / "packages")
    note = 'python3 -c \'import site; open(site.getsitepackages()[0] + "/ray.pth", "w").write("/opt/ray")\''
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY packages /opt/ray\nRUN {note}\n")
    name, env = "cloudtrain-test:ray", {**os.environ, "DOCKER_BUILDKIT": "0"}
    build = ["docker", "build", "--quiet", "--network", "none", "--tag", name, str(folder)]
    subprocess.run(build, check=True, capture_output=True, env=env)
    return name


def two_hosts(options: dict[str, Any], place: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return a place's options with a host for each of two nodes."""
    if place != "ssh":
        return options
    return {**options, "hosts": [{"address": host.address} for host in request.getfixturevalue("lab").hosts[:2]]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(
            place,
            name,
            marks=pytest.mark.docker if place in DOCKER else () if (place, name) in SAMPLE else pytest.mark.long,
        )
        for place in PLACES[1:]
        for name in ROLES
    ],
)
def test_it_runs_from_the_same_file(
    place: str, name: str, tmp_path: Path, home: Path, held: socket.socket, request: pytest.FixtureRequest
):
    source = tmp_path / "source"
    shutil.copytree(EXAMPLES / name, source)
    text = (source / "job.yaml").read_text().replace("18431", str(held.getsockname()[1]))
    job = yaml.safe_load(text) | {"source": str(source)}
    del job["target"]
    with open_place(place, request) as at:
        options = two_hosts(at.options, place, request)
        run = Submitter(at.backend, home=home, watch=False, **options).submit(job | {"output": at.output})
        end = run.wait(5 * WAIT_S)
        printed = "\n".join(line.text for line in run.logs())
        if name == "train-eval":
            assert (run.fetch(tmp_path / "fetched") / "outputs/evaluator/best.json").exists()
    assert end.state is State.SUCCEEDED, printed
    assert re.search(SHOWN[name], printed), printed
    assert run.metrics("reward" if name == "grpo" else "eval_loss")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=pytest.mark.docker if place in DOCKER else pytest.mark.long)
        for place in ("local", "ssh", "slurm", "kubernetes", "sagemaker-local", "vertex-local")
    ],
)
def test_ray_trains_on_two_nodes(place: str, tmp_path: Path, home: Path, request: pytest.FixtureRequest, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", sys.prefix)  # which hosts of the lab see, unlike this user's home
    python = make_environment("ray", RAY)
    job = yaml.safe_load((EXAMPLES / "ray/job.yaml").read_text()) | {"source": str(EXAMPLES / "ray")}
    del job["target"]
    job["environment"] = {"requirements": "none"}
    with open_place(place, request) as at:
        options = two_hosts(at.options, place, request)
        if place in DOCKER:
            (tmp_path / "image").mkdir()
            options["image"] = ray_image(python, tmp_path / "image")
        else:
            options["python"] = str(python)
        run = Submitter(at.backend, home=home, watch=False, **options).submit(job | {"output": at.output})
        end = run.wait(10 * WAIT_S)
        printed = "\n".join(line.text for line in run.logs())
    assert end.state is State.SUCCEEDED, printed
    assert re.search(r"Ray has 2 nodes\n(.|\n)*epoch=20 loss=0\.00", printed), printed
    assert run.metrics("loss")
