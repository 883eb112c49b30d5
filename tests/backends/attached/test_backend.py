"""Attaching to runs of simulated clouds: what their launchers leave in the bucket tells what the platform tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import cloudtrain
from cloudtrain.events import State
from cloudtrain.runs.planning import attempts
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import resume
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch_all import watch_run
from cloudtrain.simulators.sagemaker.server import REGION, ROLE, Simulator
from tests.backends.kubernetes.clusters import ground
from tests.backends.sagemaker.test_backend import BUCKET, simulator  # noqa: F401 - a fixture
from tests.backends.vertex.bench import Bench
from tests.runs.test_attach import told

pytestmark = [pytest.mark.usefixtures("census"), pytest.mark.timeout(600)]
SCRIPT = """
import os, pathlib, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
print('::cloudtrain::{"kind": "metric", "step": 1, "loss": %d.5}' % rank, flush=True)
pathlib.Path(os.environ["CLOUDTRAIN_MODEL_DIR"], f"weights-{rank}").write_text("12345")
if rank == 1:
    open("data/missing.txt")
time.sleep(300)
"""


class Place(NamedTuple):
    """Where to submit to, and what a client's environment must have to read the bucket there."""

    target: str
    options: dict[str, Any]
    environ: dict[str, str]
    output: str
    job: dict[str, Any]


@pytest.fixture
def sagemaker(simulator: Simulator) -> Place:  # noqa: F811
    given = {
        "role": ROLE,
        "bucket": BUCKET,
        "region": REGION,
        "image": "any",
        "client": "boto3",
        "account": "123456789012",
    }
    options = {**given, "endpoint": simulator.url}
    environ = {"AWS_ENDPOINT_URL": simulator.url}
    return Place("sagemaker", options, environ, f"s3://{BUCKET}/cloudtrain/runs", {"resources": {"cpus": 2}})


@pytest.fixture
def vertex(tmp_path: Path) -> Iterator[Place]:
    made = Bench(tmp_path)
    given = {"project": "local", "bucket": "local", "image": "any:1", "client": "rest", "settle_s": 1.0}
    options = {**given, "endpoint": made.simulator.url}
    environ = {"STORAGE_EMULATOR_HOST": made.simulator.url}
    yield Place("vertex", options, environ, "gs://local/cloudtrain", {"environment": {"requirements": "none"}})
    made.simulator.close()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Place]:
    with ground(tmp_path / "ground") as made:
        options = {"kubeconfig": str(made.cluster.kubeconfig), "image": "any:1", "poll_s": 0.1}
        environ = {"STORAGE_EMULATOR_HOST": made.store.url}
        yield Place("kubernetes", options, environ, "gs://local/out", {"output": "gs://local/out"})


@pytest.mark.parametrize("cloud", ["sagemaker", "vertex", "kubernetes"])
def test_a_failed_run_of_a_cloud_is_told_from_its_bucket(
    cloud: str, request: pytest.FixtureRequest, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
):
    place: Place = request.getfixturevalue(cloud)
    for name, value in place.environ.items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    job = {"name": "shared", "source": str(source), "entrypoint": "train.py", "num_nodes": 2, **place.job}
    run = Submitter(place.target, home=home, watch=False, **place.options).submit(job)
    status = watch_run(run.store, run.run_id)
    assert status is not None and status.state is State.FAILED, status
    attached = cloudtrain.attach(f"{place.output}/{run.run_id}", tmp_path / "colleague")
    assert scrubbed(attached) == scrubbed(run)
    assert set(run.attempts[0].images) == ({0, 1} if cloud == "kubernetes" else set())
    assert attached.attempts[0].images == {}, "it was the watcher who asked the platform"
    verdict = attached.verdict()
    assert verdict is not None and (verdict.label, verdict.rank) == ("missing-file", 1)
    assert (attached.record.status.state, attached.record.backend) == (State.FAILED, cloud)
    attached.fetch(tmp_path / "got", ("model",))
    assert "weights-1" in {path.name for path in (tmp_path / "got" / "model").iterdir()}
    brought = resume.bring(attached.store, attached.attempts[-1], str(attached.record.attached))
    assert brought.bundle.source_sha256 == run.attempts[-1].plan.bundle["source_sha256"]
    assert attempts.reaches(replace(run.attempts[-1].plan, job=brought.job), attached.attempts[-1].plan)


def scrubbed(run: Run) -> dict[str, Any]:
    """Return what is told of a run, without what only the platform knows: lines, reasons, bill, images."""
    found = told(run)
    shown = found["shown"]
    for each in (shown, *shown["attempts"]):
        for name in ("url", "billable_s", "reason"):
            each.pop(name)
    shown.pop("verdict")
    shown["events"] = [event for event in shown["events"] if event["kind"] != "status"]
    for attempt in shown["attempts"]:
        attempt.pop("images")
    found["log"] = sorted((node, rank, text) for _, node, rank, _, text in found["log"] if rank >= 0)
    return found
