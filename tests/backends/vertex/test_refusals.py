"""What Vertex AI refuses is said in a sentence; an outage is no refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.vertex.backend import VertexBackend
from cloudtrain.backends.vertex.jobs import CustomJobs
from cloudtrain.errors import BackendError, CloudtrainError, NoCapacity, NotReached, Unreachable
from cloudtrain.job.job import Job
from cloudtrain.simulators.http import Fault
from tests.backends.vertex.bench import UPLOAD, Bench
from tests.conftest import served

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


class Answers(BaseHTTPRequestHandler):
    """Answers what `given` says, a status and a body; 0 closes the connection."""

    given: tuple[int, bytes]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.given
        if status:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def said_by(address: str, job: dict, *, sdk: bool) -> BackendError:
    jobs = CustomJobs(GoogleApi("us-central1", lambda: address), "p", "us-central1", settle_s=0, pause_s=0, look_s=0)
    with pytest.raises(BackendError) as caught:
        (jobs._create_by_sdk if sdk else jobs._create)("projects/p/locations/us-central1", job)
    return caught.value


DETAILS = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [{"field": "custom_job"}]}]
MESSAGES = {
    400: ("bad request\nof two lines", "Resources are insufficient in region: r.", "Unsupported location r"),
    403: ("Permission 'aiplatform.customJobs.create' denied", "You do not have permission to act as a@p.iam"),
    404: ("The project p does not exist",),
    409: ("It exists already", "The operation was aborted"),
    429: (RATE, "The quota is exceeded", "custom_model_training_nvidia_l4_gpus"),
    499: ("The operation was cancelled",),
    **dict.fromkeys((500, 501, 503, 504), ("Internal error encountered.",)),
}
REFUSALS = [
    *((status, {"error": {"code": status, "message": text}}) for status, texts in MESSAGES.items() for text in texts),
    (400, {"error": {"code": 400, "message": "Invalid value", "status": "INVALID_ARGUMENT", "details": DETAILS}}),
    (404, "<!DOCTYPE html><html lang=en><title>Error 404 (Not Found)!!1</title>"),
    (403, "denied by a proxy"),
    (502, "<html>Bad Gateway</html>"),
    (500, ""),
]


def test_both_clients_say_the_same_of_every_refusal(address: str, paper: Bench) -> None:
    job = paper.plan("print(1)")[0].request["customJob"]
    for status, body in REFUSALS:
        Answers.given = status, (body if isinstance(body, str) else json.dumps(body)).encode()
        rest, sdk = (said_by(address, job, sdk=sdk) for sdk in (False, True))
        assert (type(sdk), sdk.message, sdk.hint) == (type(rest), rest.message, rest.hint), (status, body)
    Answers.given = 401, json.dumps({"error": {"code": 401, "message": "Invalid credentials"}}).encode()
    for refused in (said_by(address, job, sdk=sdk) for sdk in (False, True)):  # the SDK refreshes them first
        assert "credentials" in refused.message and not isinstance(refused, Unreachable)


@pytest.mark.parametrize("sdk", [False, True])
@pytest.mark.parametrize("answer", [(200, b"{}"), (200, b"<html>"), (200, b""), (0, b"")])
def test_a_job_may_be_there_after_an_answer_that_names_none(address: str, paper: Bench, answer, sdk: bool) -> None:
    Answers.given = answer
    assert isinstance(said_by(address, paper.plan("print(1)")[0].request["customJob"], sdk=sdk), Unreachable)
