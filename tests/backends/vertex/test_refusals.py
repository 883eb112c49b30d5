"""What Vertex AI refuses is said in a sentence; an outage is no refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.errors import BackendError, CloudtrainError, NoCapacity, NotReached, Unreachable
from cloudtrain.job.job import Job
from cloudtrain.simulators.http import Fault
from tests.backends.vertex.bench import UPLOAD, Bench

pytestmark = pytest.mark.usefixtures("quick")

CLIENTS = pytest.mark.parametrize("client", ["rest", pytest.param("sdk", marks=pytest.mark.long)])


@CLIENTS
@pytest.mark.parametrize(
    ("status", "text", "said", "hint"),
    [
        (
            429,
            "The following quota metrics exceed quota limits: aiplatform.googleapis.com/"
            "custom_model_training_preemptible_nvidia_a100_gpus",
            "custom_model_training_preemptible_nvidia_a100_gpus",
            "Spot machines have separate quotas",
        ),
        (
            400,
            "Resources are insufficient in region: us-central1. Please try a different region.",
            "insufficient capacity now",
            "another region",
        ),
        (
            403,
            "You do not have permission to act as service_account: train@p.iam",
            "service account",
            "serviceAccountUser",
        ),
        (
            403,
            "Vertex AI API has not been used in project p before or it is disabled.",
            "switched off",
            "gcloud services enable",
        ),
        (400, "Unsupported location us-moon1 for Vertex AI", "not available in this region", "the target's region"),
        (403, "Permission 'aiplatform.customJobs.create' denied", "permission denied", "cloudtrain permissions"),
        (400, "Machine type is not supported", "Machine type is not supported", ""),
    ],
)
def test_refusals_are_sentences_that_say_what_to_do(paper: Bench, client, status, text, said, hint):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", r"/customJobs(\?|$)", status, text, times=9))
    with pytest.raises(CloudtrainError) as caught:
        paper.backend(client=client).submit(plan, bundle)
    assert said in caught.value.message and hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert isinstance(caught.value, NoCapacity) is ("quota" in text or said == "insufficient capacity now")
    assert not isinstance(caught.value, Unreachable)
    assert len(paper.sent()) == 1, "what is refused is not sent again"


RATE = "Quota exceeded for quota metric 'Create requests' and limit 'Create requests per minute per region'"


@CLIENTS
@pytest.mark.parametrize(("status", "text"), [(429, RATE), (429, "slow down"), (500, "x"), (503, "x"), (0, "")])
@pytest.mark.parametrize("path", [r"/customJobs(\?|$)", UPLOAD])
def test_an_outage_is_no_refusal(paper: Bench, client, status, text, path):
    plan, bundle = paper.plan("print(1)")
    paper.simulator.faults.append(Fault("POST", path, status, text, times=99))
    with pytest.raises(NotReached if path == UPLOAD else Unreachable) as caught:
        paper.backend(client=client).submit(plan, bundle)
    assert not isinstance(caught.value, NoCapacity)


def test_a_bucket_that_is_not_there(paper: Bench):
    plan, bundle = paper.plan("print(1)")
    backend = paper.backend(bucket="nowhere")
    with pytest.raises(BackendError, match="bucket nowhere does not exist"):
        backend.submit(backend.plan(Job.from_dict(plan.job), bundle, "run"), bundle)
    assert [problem for problem in backend.check() if "bucket" in problem.message]
    assert paper.sent() == [] and paper.backend().check() == []


def test_a_service_that_does_not_answer(tmp_path: Path):
    place = {"project": "p", "bucket": "b", "endpoint": "http://127.0.0.1:9", "client": "rest"}
    backend = VertexBackend(place, tmp_path)
    with pytest.raises(Unreachable, match="cannot be reached"):
        backend.find("run-a1")
    assert backend.check()
