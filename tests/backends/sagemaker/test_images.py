"""Which image a SageMaker job runs: what moto's ECR says of its tag, kept with the attempt."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from cloudtrain.backends.sagemaker import ecr
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.simulators.sagemaker.server import ACCOUNT, REGION, Fault, Simulator
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_faults import Bench, bench  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_quickstart import cloudtrain, target  # noqa: F401 - a fixture
from tests.conftest import wait_for

REGISTRY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
IMAGE = f"{REGISTRY}/team/training:1"
PINNED = f"{IMAGE}@sha256:{'0' * 64}"


def push(simulator: Simulator, content: str) -> str:  # noqa: F811
    """Push an image under IMAGE's tag and return its digest.

    It is the manifest's sha256, as ECR computes it; moto is told, since it would take the layers' otherwise.
    """
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    layer = {"mediaType": kind, "size": 1, "digest": f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": layer, "layers": [layer]})
    try:
        simulator.call("ecr", "create_repository", repositoryName="team/training")
    except Exception as error:
        if "AlreadyExists" not in type(error).__name__:
            raise
    digest = f"sha256:{hashlib.sha256(manifest.encode()).hexdigest()}"
    image = {"repositoryName": "team/training", "imageManifest": manifest, "imageDigest": digest, "imageTag": "1"}
    assert simulator.call("ecr", "put_image", **image)["image"]["imageId"]["imageDigest"] == digest
    return digest


def submitted(bench: Bench, image: str, name: str = "seen", **changes) -> str:  # noqa: F811
    """Submit a job and return its handle when it has begun."""
    handle = bench.backend.submit(*bench.plan(name=name, image=image, **changes))
    wait_for(lambda: bench.backend.status(handle).started_at, "its start")
    return handle


def test_a_job_that_never_began_has_none(bench: Bench) -> None:  # noqa: F811
    push(bench.simulator, "first")
    bench.simulator.behavior.capacity_errors = 1
    handle = bench.backend.submit(*bench.plan(name="seen", image=IMAGE))
    status = bench.final(handle)
    assert (status.event, status.started_at) == ("capacity", None)
    assert bench.backend.images(handle) == {} and "ecr:BatchGetImage" not in bench.simulator.calls


def test_it_is_what_the_tag_stands_for_on_every_node(bench: Bench) -> None:  # noqa: F811
    first = push(bench.simulator, "first")
    handle = submitted(bench, IMAGE, num_nodes=2)
    assert bench.backend.images(handle) == {0: f"{IMAGE}@{first}", 1: f"{IMAGE}@{first}"}
    second = push(bench.simulator, "second")
    assert second != first and bench.connect().images(handle)[0] == f"{IMAGE}@{second}"
    bench.final(handle)
    assert bench.backend.images(handle)[1] == f"{IMAGE}@{second}", "soon after its start, though it has ended"
    bench.simulator.jobs["seen-a1"]._started -= 7200.0
    assert bench.backend.images(handle) == {}, "hours after its start the tag may be another image's"
    assert bench.backend.images(handle.replace("seen", "never")) == {}


def test_a_job_that_names_a_digest_is_believed_however_old_it_is(bench: Bench) -> None:  # noqa: F811
    handle = submitted(bench, PINNED)
    bench.final(handle)
    bench.simulator.jobs["seen-a1"]._started -= 7200.0
    assert bench.backend.images(handle) == {0: PINNED} and "ecr:BatchGetImage" not in bench.simulator.calls


def test_who_cannot_be_asked_is_not(bench: Bench) -> None:  # noqa: F811
    digest = push(bench.simulator, "first")
    for name, exact, asked in (
        (IMAGE, f"{IMAGE}@{digest}", True),
        (PINNED, PINNED, False),
        (f"registry.example.com/training@sha256:{'1' * 64}", f"registry.example.com/training@sha256:{'1' * 64}", False),
        ("registry.example.com/training:1", "", False),
        ("", "", False),
        (f"{REGISTRY.replace(REGION, 'eu-west-1')}/team/training:1", "", False),
        (f"{REGISTRY}.example.com/team/training:1", "", False),
        (f"{REGISTRY}/team/training:2", "", True),
        (f"{REGISTRY}/team/training", "", True),
        (f"{REGISTRY}/team/other:1", "", True),
    ):
        bench.simulator.calls.clear()
        assert ecr.resolve_digest(bench.backend.aws, name) == exact, name
        assert bench.simulator.calls == ["ecr:BatchGetImage"] * asked, name


def test_the_registry_of_another_account_is_asked_as_who_pulls_asks_it(bench: Bench) -> None:  # noqa: F811
    push(bench.simulator, "first")
    sent: list[dict] = []
    look = "provide-client-params.ecr.BatchGetImage"
    bench.backend.aws.client("ecr").meta.events.register(look, lambda params, **_: sent.append(dict(params)))
    handle = submitted(bench, IMAGE.replace(ACCOUNT, "763104351884"))
    assert list(bench.backend.images(handle)) == [0]
    (request,) = sent
    assert (request["registryId"], request["repositoryName"]) == ("763104351884", "team/training")
    assert request["imageIds"] == [{"imageTag": "1"}] and len(request["acceptedMediaTypes"]) == 4


def test_a_denial_is_a_sentence(bench: Bench) -> None:  # noqa: F811
    push(bench.simulator, "first")
    handle = submitted(bench, IMAGE)
    place = f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/team/training"
    message = (
        f"User: u is not authorized to perform: ecr:BatchGetImage on resource: {place} because no policy allows it"
    )
    bench.simulator.faults.append(Fault("BatchGetImage", 400, "AccessDeniedException", message=message))
    with pytest.raises(BackendError, match=f"AWS denies ecr:BatchGetImage on {place}"):
        bench.backend.images(handle)
    bench.simulator.faults.append(Fault("BatchGetImage", 500, "ServerException", times=99))
    with pytest.raises(BackendError, match="failed on AWS's side 2 times"):
        bench.backend.images(handle)
    assert bench.simulator.calls.count("ecr:BatchGetImage") == 3


@pytest.mark.parametrize("denied", [False, True])
def test_the_watcher_keeps_it_and_a_denial_is_in_nobodys_way(
    target: str,  # noqa: F811
    simulator: Simulator,  # noqa: F811
    home: Path,
    tmp_path: Path,
    denied: bool,
) -> None:
    digest = push(simulator, "first")
    if denied:
        simulator.faults.append(Fault("BatchGetImage", 400, "AccessDeniedException", times=99))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print('done')\n")
    words = ["submit", str(tmp_path / "project" / "train.py"), "-t", target, "--set", f"image={IMAGE}"]
    run = Run.find(json.loads(cloudtrain(*words, "--wait", "--json").splitlines()[-1])["run_id"])
    run.read_rest()  # its end may be stored before its images are asked for
    attempt = run.store.attempts(run.run_id)[-1]
    assert attempt.status.state is State.SUCCEEDED
    assert attempt.images == ({} if denied else {0: f"{IMAGE}@{digest}"})
    if denied:
        log = (home / "watch.log").read_text()
        assert run.run_id in log and "AWS denies ecr:BatchGetImage" in log, log
