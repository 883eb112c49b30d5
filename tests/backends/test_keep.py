"""`keep` on platforms that take a machine away without notice: what was copied by then is back at the next start."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.backends.api import Backend
from cloudtrain.backends.attached.backend import AttachedBackend
from cloudtrain.backends.checkpoints import name_here
from cloudtrain.backends.sagemaker import docker as engine
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.backends.sagemaker.local import SagemakerLocalBackend
from cloudtrain.backends.vertex.local import VertexLocalBackend
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.simulators.sagemaker.server import Simulator
from cloudtrain.source.bundle import Bundle
from tests.backends.sagemaker.test_backend import BUCKET, options, simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_local_docker import docker  # noqa: F401 - a fixture
from tests.backends.vertex.test_local import shared_home  # noqa: F401 - a fixture
from tests.conftest import wait_for

# The first start removes a file that was copied already, says when that has been followed, and waits for its end.
SCRIPT = """
import os, sys, time
copies = os.environ["CLOUDTRAIN_OUTPUT_DIR"] + "/out"
print("CHECKPOINTS", sorted(os.listdir(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])), flush=True)
print("FOUND", sorted(os.path.join(at, name) for at, _, names in os.walk("out") for name in names), flush=True)
if os.path.exists("out/deep/model"):
    open("out/deep/model", "a").write("2")
    open("scratch", "w").write("x" * 1234)
    sys.exit(0)
os.makedirs("out/deep")
open("out/deep/model", "w").write("1")
open("out/removed", "w").write("soon")
while not os.path.exists(copies + "/removed"):
    time.sleep(0.05)
os.unlink("out/removed")
while os.path.exists(copies + "/removed"):
    time.sleep(0.05)
print("followed", flush=True)
time.sleep(600)
"""
COPY, REMOVED = "out/deep/model", "out/removed"


class Keeping:
    """A job with `keep`, and its attempts on one backend."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        (folder / "source").mkdir()
        (folder / "source" / "train.py").write_text(SCRIPT)
        self.bundle = Bundle.make(folder / "source", folder / "bundles")

    def submit(self, attempt: int = 1, **changes) -> str:
        data = {"name": "keeps", "source": str(self.folder / "source"), "entrypoint": "train.py", "keep": ["out"]}
        job = Job.from_dict({**data, "environment": {"requirements": "none"}, **changes})
        return self.backend.submit(self.backend.plan(job, self.bundle, "keeps", attempt), self.bundle)

    def log(self, handle: str) -> list[str]:
        return [line.text for line in self.backend.logs(handle)]

    def followed(self, handle: str, copies: Callable[[], set[str]]) -> None:
        """Wait until the script knows that its removal was followed, and until the platform has what it left."""
        wait_for(lambda: "followed" in self.log(handle), "the removal of a copy")
        wait_for(lambda: copies() == {COPY}, "the platform's copies")

    def check(self, handle: str) -> None:
        """Wait for a good end, and check what the last start found and what comes home."""
        wait_for(lambda: self.backend.status(handle).state.final, "the end")
        log = self.log(handle)
        assert self.backend.status(handle).state is State.SUCCEEDED, log
        assert [text for text in log if text.startswith("FOUND")][-1] == f"FOUND ['{COPY}']"
        assert any(
            "1.2 KB in scratch are not kept, and the next attempt will not find them: set keep: [scratch]" in text
            for text in log
        ), log
        into = self.backend.fetch(handle, self.folder / "fetched")
        files = {str(path.relative_to(into)): path.read_text() for path in into.rglob("*") if path.is_file()}
        assert files == {f"outputs/{COPY}": "12"}


def test_on_sagemaker(simulator: Simulator, tmp_path: Path, home: Path):  # noqa: F811
    simulator.behavior.environment["CLOUDTRAIN_SYNC_EVERY_S"] = "0.2"
    keeping = Keeping(SagemakerBackend(options(simulator), home / "runs"), tmp_path)
    below = "out/keeps/checkpoints/.cloudtrain/kept/node-0/"

    def copies() -> set[str]:
        listed = simulator.call("s3", "list_objects_v2", Bucket=BUCKET, Prefix=below)
        return {item["Key"].removeprefix(below) for item in listed.get("Contents", [])}

    first = keeping.submit(output=f"s3://{BUCKET}/out")
    keeping.followed(first, copies)
    simulator.jobs["keeps-a1"]._hosts[0].end()
    wait_for(lambda: keeping.backend.status(first).state.final, "the end of the first attempt")
    second = keeping.submit(2, output=f"s3://{BUCKET}/out")
    keeping.check(second)
    for handle in (first, second):
        assert "CHECKPOINTS []" in keeping.log(handle), "nothing of ours lies there"
    attached = AttachedBackend({}, home / "runs")  # what is read elsewhere has the same names
    (newest,) = [a for a in attached.attempts(f"s3://{BUCKET}/out/keeps") if a.plan.attempt == 2]
    assert attached.fetch(f"attached:keeps-a2@{newest.uri}", tmp_path / "elsewhere")
    assert [path for path in (tmp_path / "elsewhere" / "checkpoints").rglob("*") if path.is_file()] == []
    assert (tmp_path / "elsewhere" / "outputs" / COPY).read_text() == "12"


def test_on_vertex_local(shared_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setenv("CLOUDTRAIN_SYNC_EVERY_S", "0.2")
    backend = VertexLocalBackend({}, shared_home / "runs")
    keeping = Keeping(backend, tmp_path)
    handle = keeping.submit(resources={"use_spot": True}, retry={"max_attempts": 3})
    address = backend._address()
    below = "cloudtrain/keeps/outputs/"

    def copies() -> set[str]:
        with urllib.request.urlopen(f"{address}/storage/v1/b/local/o?prefix={below}", timeout=60) as answer:
            return {item["name"].removeprefix(below) for item in json.load(answer).get("items", [])}

    keeping.followed(handle, copies)
    lose = f"{address}/simulator/preempt/{handle.rpartition('/')[2]}?notice=no"
    with urllib.request.urlopen(urllib.request.Request(lose, method="POST"), timeout=60):
        pass
    keeping.check(handle)


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_in_containers_as_on_sagemaker(tmp_path: Path, home: Path):
    keeping = Keeping(SagemakerLocalBackend({}, home / "runs"), tmp_path)
    run = home / "runs" / "keeps"

    def copies() -> set[str]:
        return {str(path.relative_to(run / "outputs")) for path in (run / "outputs").rglob("*") if path.is_file()}

    first = keeping.submit()
    keeping.followed(first, copies)
    (container,) = engine.list_containers(Path(first))
    engine.send_signal(container, "KILL")
    wait_for(lambda: keeping.backend.status(first).state.final, "the end of the first attempt")
    keeping.check(keeping.submit(2))


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("checkpoint_dir/checkpoint-5/model", "checkpoint-5/model"),
        (".cloudtrain/kept/node-0/out/x", ""),
        ("checkpoint-5/model", "checkpoint-5/model"),  # by a script that knows /opt/ml/checkpoints, or of an older run
        ("step-00000010.a1/COMPLETE", "step-00000010.a1/COMPLETE"),
    ],
)
def test_the_names_of_checkpoints_that_sagemaker_copies(name: str, here: str):
    assert name_here(name) == here
