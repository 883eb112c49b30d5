"""A run that moves between kinds of platforms, SageMaker among them, and keeps the folder of its checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import pytest

import cloudtrain
from cloudtrain.backends.vertex.local import VertexLocalBackend
from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.sagemaker.test_backend import BUCKET, options
from tests.backends.ssh.test_backend import options as machine_options
from tests.backends.ssh.test_training import QUICKSTART, SMALL
from tests.backends.vertex.test_local import end_simulator
from tests.conftest import WAIT_S
from tests.lab.connections import close_all
from tests.lab.slurm import Slurm
from tests.simulators.kubernetes_cluster.server import Cluster

pytestmark = pytest.mark.usefixtures("census")
EACH = 5  # steps of an attempt of the shared trainer
# Saves, and fails on every attempt but the third.
SCRIPT = """
import os, pathlib, sys
folder, attempt = pathlib.Path(sys.argv[1]), os.environ["CLOUDTRAIN_ATTEMPT"]
print("FOUND", *sorted(path.name for path in folder.glob("*.txt")), flush=True)
(folder / f"{attempt}.txt").write_text(attempt)
sys.exit(0 if attempt == "3" else 3)
"""
# The process is killed in the moment in which a checkpoint of that step is whole.
FAULT = """
import os, signal
step, replace = int(os.environ.get("DIES_AT") or 0), os.replace
def mortal(source, target, **given):
    replace(source, target, **given)
    folder, name = os.path.split(str(target))
    if name == "COMPLETE" and int(os.path.basename(folder)[5:13]) >= step:
        os.kill(os.getpid(), signal.SIGKILL)
if step:
    os.replace = mortal
"""


class Route(NamedTuple):
    """Targets, in which order a run is on them, the output that all of them use, and a folder that all of them see."""

    targets: Mapping[str, Mapping[str, Any]]
    places: tuple[str, ...]
    output: str
    shared: Path


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """SageMaker and S3, which launchers on this machine reach too."""
    started = Simulator(tmp_path / "hosts")
    for name, value in {**started.environ, "CLOUDTRAIN_SYNC_EVERY_S": "0.2"}.items():
        monkeypatch.setenv(name, value)
    with urlopen(Request(f"{started.url}/moto-api/reset", method="POST"), timeout=WAIT_S):
        pass
    started.make_bucket(BUCKET)
    yield started
    started.close()


@pytest.fixture
def sagemaker(simulator: Simulator, tmp_path: Path) -> Route:
    prod = {"backend": "sagemaker", **options(simulator)}
    return Route({"prod": prod}, ("local", "prod", "local"), f"s3://{BUCKET}/out", tmp_path)


@pytest.fixture
def machines(slurm: Slurm) -> Iterator[Route]:
    cluster = {"backend": "slurm", "folder": str(slurm.shared), "python": sys.executable, "partition": "main"}
    given = {"login": {"backend": "ssh", **machine_options(slurm.lab, 1)}, "cluster": cluster}
    yield Route(given, ("login", "local", "cluster", "local"), str(slurm.shared / "out"), slurm.shared)
    close_all()


@pytest.fixture
def clouds(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Route]:
    address = VertexLocalBackend({}, home / "runs")._address()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    monkeypatch.setenv("CLOUDTRAIN_SYNC_EVERY_S", "0.2")
    cluster = Cluster(tmp_path / "cluster", env={"STORAGE_EMULATOR_HOST": address})
    given = {"backend": "kubernetes", "image": "any:1", "kubeconfig": str(cluster.kubeconfig), "server": cluster.url}
    given["poll_s"] = 0.2
    yield Route({"cluster": given}, ("cluster", "vertex-local", "cluster"), "gs://local/out", tmp_path)
    cluster.close()
    end_simulator(home)


def configure(folder: Path, targets: Mapping[str, Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the targets into a configuration that is found."""

    def written(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(written, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{name} = {written(inner)}' for name, inner in value.items())}}}"
        return json.dumps(value)

    lines = []
    for target, given in targets.items():
        lines += [f"[targets.{target}]", *(f"{name} = {written(value)}" for name, value in given.items())]
    folder.mkdir()
    (folder / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(folder))


@pytest.mark.parametrize(
    ("places", "inner"),
    [(("local", "prod", "local"), ""), (("prod", "local", "prod"), "checkpoint_dir/")],
    ids=["from here", "from SageMaker"],
)
def test_a_script_finds_what_it_saved_elsewhere(sagemaker, simulator, places, inner, tmp_path, home, monkeypatch):
    """There is one folder of checkpoints, that of the first attempt, wherever the run is; all is told of it elsewhere."""
    configure(tmp_path / "config", sagemaker.targets, monkeypatch)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    job = {"name": "moves", "source": str(tmp_path / "source"), "entrypoint": "train.py", "output": sagemaker.output}
    run = Submitter(places[0], home=home, watch=False).submit({**job, "args": ["{checkpoint_dir}"]})
    for place in places[1:]:
        assert run.wait(WAIT_S).exit_code == 3, run.record.status
        run.resume(target=place)
        assert f"resumes from the newest checkpoint in {sagemaker.output}/{run.run_id}" in " ".join(run.notes)
    assert run.wait(WAIT_S).state is State.SUCCEEDED, run.record.status
    expected = ["FOUND", "FOUND 1.txt", "FOUND 1.txt 2.txt"]
    assert [line.text for line in run.logs() if line.text.startswith("FOUND")] == expected

    below, names = f"out/{run.run_id}/checkpoints/", {f"{number}.txt" for number in (1, 2, 3)}
    listed = simulator.call("s3", "list_objects_v2", Bucket=BUCKET, Prefix=below)["Contents"]
    keys = {item["Key"].removeprefix(below) for item in listed}
    assert {key for key in keys if not key.startswith(".cloudtrain/")} == {f"{inner}{name}" for name in names}
    fetched = run.fetch(tmp_path / "fetched", ("checkpoints",)) / "checkpoints"
    assert {str(path.relative_to(fetched)) for path in fetched.rglob("*")} == names

    attached = cloudtrain.attach(f"{sagemaker.output}/{run.run_id}", tmp_path / "colleague")
    assert attached.record.status.state is State.SUCCEEDED
    assert [line.text for line in attached.logs() if line.text.startswith("FOUND")] == expected
    brought = attached.fetch(tmp_path / "brought", ("checkpoints",)) / "checkpoints"
    assert {str(path.relative_to(brought)) for path in brought.rglob("*")} == names


def test_a_bucket_that_sagemaker_does_not_use_is_refused(sagemaker, tmp_path, home, monkeypatch):
    configure(tmp_path / "config", sagemaker.targets, monkeypatch)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    job = {"name": "moves", "source": str(tmp_path / "source"), "entrypoint": "train.py", "args": ["{checkpoint_dir}"]}
    run = Submitter("local", home=home, watch=False).submit(job)
    assert run.wait(WAIT_S).exit_code == 3
    with pytest.raises(BadRequest, match="which prod does not read"):
        run.resume(target="prod")


@pytest.mark.train
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "which",
    ["sagemaker", pytest.param("machines", marks=pytest.mark.long), pytest.param("clouds", marks=pytest.mark.long)],
)
def test_trained_on_several_platforms(which, request, tmp_path, home, monkeypatch):
    """Each attempt but the last is killed at a checkpoint that it has not reported: the losses are those of an unbroken run."""
    route: Route = request.getfixturevalue(which)
    configure(tmp_path / "config", route.targets, monkeypatch)
    (route.shared / "faults").mkdir()
    (route.shared / "faults" / "sitecustomize.py").write_text(FAULT)
    changes = {**SMALL, "num_nodes": 1, "retry.max_attempts": 1, "checkpoint.every": f"{EACH} steps"}
    sets = [f"{name}={value}" for name, value in changes.items()]
    sets.append(f"hyperparameters.max_steps={EACH * len(route.places)}")
    unbroken = Submitter("local", home=home, watch=False).submit(QUICKSTART, sets=sets, key="unbroken")
    assert unbroken.wait(5 * WAIT_S).state is State.SUCCEEDED, unbroken.record.status

    sets += [f"output={route.output}", f"env.PYTHONPATH={route.shared / 'faults'}", f"env.DIES_AT='{EACH}'"]
    run = Submitter(route.places[0], home=home, watch=False).submit(QUICKSTART, sets=sets)
    for number, place in enumerate(route.places[1:], 2):
        assert run.wait(5 * WAIT_S).state is State.FAILED, run.record.status
        dies_at = EACH * number if number < len(route.places) else 0
        run.resume(target=place, sets=[f"env.DIES_AT='{dies_at}'"])
    assert run.wait(5 * WAIT_S).state is State.SUCCEEDED, run.record.status

    assert [attempt.plan.target for attempt in run.attempts] == list(route.places)
    expected = {row.step: row.value for row in unbroken.metrics("loss")}
    rows = run.metrics("loss")
    begins = {
        number: min(row.step for row in rows if row.attempt == number) for number in range(1, len(run.attempts) + 1)
    }
    assert begins == {number: EACH * (number - 1) + 1 for number in begins}
    assert {row.step for row in rows} == set(expected)
    assert [(row.step, row.value) for row in rows if row.value != expected[row.step]] == [], "bit-equal"


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Iterator[Route]:
    yield Route({}, ("vertex-local", "local", "vertex-local"), str(tmp_path / "out"), tmp_path)
    end_simulator(home)


@pytest.mark.parametrize("which", ["machines", "clouds", "folder"])
def test_a_script_moves_over_a_shared_output(which, request, tmp_path, home, monkeypatch):
    """SSH to local to Slurm, Kubernetes to vertex-local and back, and a folder that vertex-local writes to."""
    route: Route = request.getfixturevalue(which)
    configure(tmp_path / "config", route.targets, monkeypatch)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(SCRIPT)
    job = {"name": "moves", "source": str(tmp_path / "source"), "entrypoint": "train.py", "output": route.output}
    run = Submitter(route.places[0], home=home, watch=False).submit({**job, "args": ["{checkpoint_dir}"]})
    for place in route.places[1:3]:
        assert run.wait(WAIT_S).exit_code == 3, run.record.status
        run.resume(target=place)
    assert run.wait(WAIT_S).state is State.SUCCEEDED, run.record.status
    assert [attempt.plan.target for attempt in run.attempts] == list(route.places[:3])
    found = [line.text for line in run.logs() if line.text.startswith("FOUND")]
    assert found == ["FOUND", "FOUND 1.txt", "FOUND 1.txt 2.txt"]
    fetched = run.fetch(tmp_path / "fetched", ("checkpoints",)) / "checkpoints"
    assert {path.name for path in fetched.iterdir()} == {"1.txt", "2.txt", "3.txt"}
