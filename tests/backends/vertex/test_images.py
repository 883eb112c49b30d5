"""Which image a custom job runs: the digest behind its tag, asked of Google's registries alone, kept with the attempt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.google import ApiError
from cloudtrain.backends.vertex import images
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.backends.vertex.local import VertexLocalBackend
from cloudtrain.errors import Unreachable
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.runs.watching.watch_all import watch_run
from cloudtrain.simulators.http import Fault
from cloudtrain.simulators.vertex.lifecycle import Behavior
from cloudtrain.simulators.vertex.logs import format_time
from cloudtrain.simulators.vertex.server import Simulator
from tests.backends.test_google import Tokens, tokens  # noqa: F401 - a fixture
from tests.backends.vertex.bench import Bench
from tests.backends.vertex.registry import Googles, Registry
from tests.conftest import WAIT_S

NAME, TAG = "my-project/train/gpu", "1"
IMAGE = f"us-central1-docker.pkg.dev/{NAME}:{TAG}"
PINNED = "docker.io/library/python@sha256:" + "ab" * 32
QUESTION = r"^/v2/.*/manifests/"


class Place(Bench):
    """A simulator with a registry at its address."""

    def __init__(self, folder: Path, behavior: Behavior | None = None) -> None:
        super().__init__(folder, behavior)
        self.simulator.close()
        self.registry = Registry()
        self.simulator = Simulator(folder / "with-registry", behavior=behavior, more=self.registry.routes)

    def submitted(self, image: str, **changes) -> tuple[VertexBackend, str]:
        plan, bundle = self.plan("print(1)", **changes)
        backend = self.backend(image=image)
        plan = backend.plan(Job.from_dict(plan.job), bundle, plan.run_id)
        handle = backend.submit(plan, bundle)
        self.begun(handle)
        return backend, handle

    def begun(self, handle: str, ago_s: float = 0.0) -> None:
        """Let a job that is never run have begun."""
        self.simulator.jobs.change(handle.rpartition("/")[2], startTime=format_time(time.time() - ago_s))

    @property
    def questions(self) -> int:
        return self.asked("GET", QUESTION)


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[Place]:
    """A service that takes jobs and never runs them."""
    made = Place(tmp_path, Behavior(execute=False))
    yield made
    made.simulator.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.simulator.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)


# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "asked"),
    [
        (IMAGE, ("us-central1-docker.pkg.dev", "/v2/my-project/train/gpu/manifests/1")),
        ("europe-docker.pkg.dev/vertex-ai/training/pytorch", "/v2/vertex-ai/training/pytorch/manifests/latest"),
        ("gcr.io/p/i:v1.0_a-b", ("gcr.io", "/v2/p/i/manifests/v1.0_a-b")),
        ("us.gcr.io/p/i", ("us.gcr.io", "/v2/p/i/manifests/latest")),
        ("gcr.io/p/i:a?b#c", ("gcr.io", "/v2/p/i/manifests/a%3Fb%23c")),
        (f"{IMAGE}@sha256:{'ab' * 32}", None),  # it is pinned
        (f"{IMAGE}@sha512:{'ab' * 64}", None),  # so is this one
        (PINNED, None),
        ("python:3.12", None),
        ("my-project/us-docker.pkg.dev/i", None),  # a folder of Docker Hub
        ("ghcr.io/p/i:1", None),
        ("localhost:5000/p/i:1", None),
        ("evil.com/us-docker.pkg.dev/i:1", None),
        ("us-docker.pkg.dev.evil.com/p/i:1", None),
        ("evilgcr.io/p/i:1", None),
        ("gcr.io.evil.com/p/i:1", None),
        ("gcr.io:8443/p/i:1", None),
        ("evil.com#-docker.pkg.dev/p/i:1", None),
        ("evil.com?.gcr.io/p/i:1", None),
        ("me:secret@gcr.io/p/i:1", None),
        ("gcr.io\n.evil.com/p/i", None),
        ("gcr.io", None),
    ],
)
def test_only_tags_at_googles_registries_are_asked_for(image: str, asked: tuple[str, str] | str | None):
    address = images.manifest_address(image)
    assert address == asked or (address is not None and address[1] == asked)


def test_a_backend_that_pulls_no_image_tells_none(tmp_path: Path):
    assert VertexLocalBackend({}, tmp_path / "runs").images("any") == {}


# -- what is answered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tells", [True, False], ids=["header", "bytes"])
def test_a_tag_is_told_with_its_digest_and_asked_for_once(paper: Place, tells: bool):
    digest = paper.registry.push(NAME, TAG, b'{"schemaVersion": 2, "manifests": []}')
    paper.registry.tells = tells
    backend, handle = paper.submitted(IMAGE, num_nodes=4)
    assert backend.images(handle) == dict.fromkeys(range(4), f"{IMAGE}@{digest}")
    assert paper.questions == 1, "two pools have one image"


def test_nodes_are_counted_as_the_log_counts_them(paper: Place):
    digest = paper.registry.push("p/worker", "2", b"{}")
    paper.registry.push(NAME, TAG, b"{ }")
    plan, bundle = paper.plan("print(1)", num_nodes=3)
    pools = [{"containerSpec": {"imageUri": PINNED}}, {"containerSpec": {"imageUri": "gcr.io/p/worker:2"}}]
    reducers = {
        "replicaCount": 2,
        "machineSpec": {"machineType": "n1-highcpu-16"},
        "containerSpec": {"imageUri": IMAGE},
    }
    backend = paper.backend(raw={"jobSpec": {"workerPoolSpecs": [*pools, reducers]}})
    handle = backend.submit(backend.plan(Job.from_dict(plan.job), bundle, "run"), bundle)
    assert backend.images(handle) == {} and paper.questions == 0, "it has not begun"
    paper.begun(handle)
    worker = f"gcr.io/p/worker:2@{digest}"
    assert backend.images(handle) == {0: PINNED, 1: worker, 2: worker}, "the reducers are no nodes"
    asked = paper.questions
    paper.begun(handle, ago_s=7200)
    assert backend.images(handle) == {0: PINNED} and paper.questions == asked, (
        "what a tag stands for now says nothing of then"
    )


@pytest.mark.parametrize("image", [PINNED, "python:3.12", "ghcr.io/p/i:1", "localhost:5000/p/i:1", "any:1"])
def test_a_pinned_image_and_another_registry_are_never_asked_for(paper: Place, image: str):
    backend, handle = paper.submitted(image, num_nodes=2)
    assert backend.images(handle) == (dict.fromkeys((0, 1), PINNED) if image == PINNED else {})
    assert paper.asked("GET", "v2") == paper.asked("HEAD", "v2") == 0


def test_a_tag_that_is_gone_is_left_out(paper: Place):
    backend, handle = paper.submitted(IMAGE)
    assert backend.images(handle) == {}
    assert paper.questions == 1


def test_a_job_that_is_gone_has_no_images(paper: Place):
    assert paper.backend().images("projects/local/locations/us-central1/customJobs/1") == {}


def test_a_registry_that_refuses_says_why(paper: Place):
    paper.registry.denied.add(NAME)
    backend, handle = paper.submitted(IMAGE)
    with pytest.raises(ApiError, match='permission denied: Permission "artifactregistry.*downloadArtifacts"') as caught:
        backend.images(handle)
    assert caught.value.status == 403 and "cloudtrain permissions" in caught.value.hint and paper.questions == 1
    paper.registry.token = "another"  # a simulator's address is sent no token
    with pytest.raises(ApiError, match="authentication failed") as caught:
        backend.images(handle)
    assert caught.value.status == 401


def test_a_registry_that_does_not_answer_is_not_asked_for_long(paper: Place):
    paper.simulator.faults.append(Fault("GET", QUESTION, 0, times=99))
    backend, handle = paper.submitted(IMAGE)
    with pytest.raises(Unreachable, match="the digest of .* is unknown"):
        backend.images(handle)
    assert paper.questions == images.TRIES


# -- the token --------------------------------------------------------------------------------------------------------


@pytest.fixture
def googles(tmp_path: Path, tokens: Tokens) -> Iterator[Googles]:  # noqa: F811
    registry = Registry()
    registry.push(NAME, TAG, b"{}")
    made = Googles(tmp_path, registry)
    yield made
    made.close()


def asked(googles: Googles, *images: str) -> list[str]:
    """Ask for images as a client without a simulator does, in a process of its own."""
    script = (
        "import json, sys; from cloudtrain.backends import google, http; from cloudtrain.backends.vertex import images\n"
        "http.PAUSE_S = 0.001\n"
        "api = google.GoogleApi('us-central1')\n"
        "print(json.dumps([images.resolve_digest(api, image) for image in sys.argv[1:]]))"
    )
    return behind(googles, script, *images)


def behind(googles: Googles, script: str, *words: str) -> Any:
    """Run a script whose network has Google's servers behind a proxy with a certificate of its own."""
    given = {"HTTPS_PROXY": googles.url} | dict.fromkeys(
        ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(googles.certificate)
    )
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | given
    done = subprocess.run(
        [sys.executable, "-c", script, *words], env=env, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_token_goes_to_googles_registry_and_to_no_other(googles: Googles):
    digest = googles.registry.push(NAME, TAG, b'{"schemaVersion": 2}')
    others = ["ghcr.io/p/i:1", "us-docker.pkg.dev.evil.com/p/i:1", "python:3.12", PINNED]
    assert asked(googles, IMAGE, *others) == [f"{IMAGE}@{digest}", "", "", "", PINNED]
    assert googles.connected == ["us-central1-docker.pkg.dev:443"]
    assert googles.heard == [("us-central1-docker.pkg.dev", f"/v2/{NAME}/manifests/{TAG}", "Bearer t0ken")]


def test_a_redirect_takes_the_token_nowhere_else(googles: Googles):
    googles.moved = "https://elsewhere.example/v2/"
    asked(googles, IMAGE)
    googles.moved = "https://us-central1-docker.pkg.dev/v2/moved"
    asked(googles, IMAGE)
    assert [(host, token) for host, _, token in googles.heard] == [
        ("us-central1-docker.pkg.dev", "Bearer t0ken"),
        ("elsewhere.example", ""),
        ("us-central1-docker.pkg.dev", "Bearer t0ken"),
        ("us-central1-docker.pkg.dev", "Bearer t0ken"),
    ]


def test_the_sdk_creates_a_job_over_the_same_proxy(googles: Googles, paper: Place):
    """By REST, and with the same account, whose key signs the SDK's token."""
    script = """
import json, sys
from cloudtrain.backends import google
from cloudtrain.backends.vertex.jobs import CustomJobs
from cloudtrain.errors import Unreachable
jobs = CustomJobs(google.GoogleApi("us-central1"), "p", "us-central1", settle_s=0, pause_s=0, look_s=0)
try:
    jobs._create_by_sdk("projects/p/locations/us-central1", json.loads(sys.argv[1]))
except Unreachable as error:
    print(json.dumps(error.message))
"""
    job = paper.plan("print(1)")[0].request["customJob"]
    assert "Vertex AI did not accept the job" in behind(googles, script, json.dumps(job))
    host, path, token = googles.heard[-1]
    assert host == "us-central1-aiplatform.googleapis.com" and token.startswith("Bearer ")
    assert path.startswith("/v1/projects/p/locations/us-central1/customJobs")


# -- what is kept -----------------------------------------------------------------------------------------------------

WAITS = """
import pathlib, sys, time
print("up", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


def job(place: Place, tmp_path: Path) -> dict:
    source = tmp_path / "mine"
    source.mkdir()
    (source / "train.py").write_text(WAITS)
    given = {"name": "kept", "source": str(source), "entrypoint": "train.py", "args": [str(tmp_path / "go")]}
    return {**given, "num_nodes": 2, "environment": {"requirements": "none"}}


def test_a_run_keeps_what_its_tag_stood_for_when_it_began(place: Place, tmp_path: Path, home: Path):
    first = place.registry.push(NAME, TAG, b'{"of": "today"}')
    options = {"project": "local", "bucket": "local", "endpoint": place.simulator.url, "image": IMAGE, "client": "rest"}
    run = Submitter("vertex", home=home, watch=False, settle_s=1.0, **options).submit(job(place, tmp_path))

    deadline = time.monotonic() + WAIT_S

    watcher = Watcher(run.store, run.run_id)
    while not (status := run.record.status).state.final:
        watcher.refresh(hold=True)
        if time.monotonic() > deadline or run.store.attempts(run.run_id)[-1].images:
            place.registry.push(NAME, TAG, b'{"of": "tomorrow"}')
            (tmp_path / "go").touch()
        time.sleep(0.05)
    assert status.state is State.SUCCEEDED, status
    kept = f"{IMAGE}@{first}"
    assert run.store.attempts(run.run_id)[-1].images == {0: kept, 1: kept} and place.questions == 1


def test_a_run_goes_on_where_the_registry_refuses(place: Place, tmp_path: Path, home: Path, capsys):
    place.registry.denied.add(NAME)
    (tmp_path / "go").touch()
    options = {"project": "local", "bucket": "local", "endpoint": place.simulator.url, "image": IMAGE, "client": "rest"}
    run = Submitter("vertex", home=home, watch=False, settle_s=1.0, **options).submit(job(place, tmp_path))
    status = watch_run(run.store, run.run_id)
    assert status is not None and status.state is State.SUCCEEDED, status
    assert run.store.attempts(run.run_id)[-1].images == {}
    assert "artifactregistry.repositories.downloadArtifacts" in capsys.readouterr().err
