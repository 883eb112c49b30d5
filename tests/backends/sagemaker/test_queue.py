"""Training jobs that go through a queue of AWS Batch: the request, the contract suite, lost answers, states, permissions."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import botocore.session
import pytest
from botocore.validate import ParamValidator

from cloudtrain.backends.sagemaker import queue
from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.backends.sagemaker.hyperparameters import PIECE
from cloudtrain.errors import BackendError, BadJob, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.simulators.sagemaker.host import find_processes
from cloudtrain.simulators.sagemaker.server import Fault
from cloudtrain.testing.contract import BackendContract
from tests.backends.sagemaker.test_backend import BUCKET, REGION, ROLE
from tests.backends.sagemaker.test_faults import Bench, _soon  # noqa: F401 - a fixture
from tests.conftest import wait_for

QUEUE = "team"


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from urllib.request import Request, urlopen

    from cloudtrain.simulators.sagemaker.server import Simulator

    started = Simulator(tmp_path / "hosts")
    for name, value in started.environ.items():
        monkeypatch.setenv(name, value)
    with urlopen(Request(f"{started.url}/moto-api/reset", method="POST"), timeout=60):
        pass  # what other tests in this process have left with moto
    started.make_bucket(BUCKET)
    started.make_queue(QUEUE)
    yield started
    calls = [call for call in started.calls if call.partition(":")[0] in ("batch", "sagemaker")]
    started.close()
    policy = SagemakerBackend({"role": ROLE, "bucket": BUCKET, "queue": QUEUE}, tmp_path).policy("submit", None)
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert set(calls) <= allowed, "the policy `submit` lacks what was called"


class QueueBench(Bench):
    def connect(self, **more) -> SagemakerBackend:
        return super().connect(**{"queue": QUEUE, **more})


@pytest.fixture
def bench(simulator, home: Path, tmp_path: Path) -> QueueBench:
    return QueueBench(simulator, home, tmp_path)


class TestQueue(BackendContract):
    @pytest.fixture
    def connect(self, simulator, home: Path):
        self.simulator = simulator
        account = {"role": ROLE, "bucket": BUCKET, "region": REGION, "image": "any", "client": "boto3"}
        options = {**account, "endpoint": simulator.url, "queue": QUEUE}
        return lambda: SagemakerBackend(options, home / "runs")

    def calls(self) -> int:
        return len(self.simulator.calls)

    def leftovers(self, handle: str) -> list[str]:
        arn = self.simulator.batch.jobs[handle.rpartition("/")[2]].trained[-1].arn
        folder = self.simulator.folder / arn.rpartition("/")[2]
        return [str(pid) for n in range(1, 5) for pid in find_processes(str(folder / f"algo-{n}"))]


def shape(service: str, operation: str):
    model = botocore.session.get_session().get_service_model(service)
    return model.operation_model(operation).input_shape


def report(service: str, operation: str, request) -> str:
    return ParamValidator().validate(request, shape(service, operation)).generate_report()


def test_the_request_is_one_of_botocores_model(bench: QueueBench) -> None:
    bench.backend = bench.connect(queue_share="nlp", queue_priority=7)
    plan, bundle = bench.plan(labels={"team": "nlp"})
    sent = queue.build_request(plan.request, bench.backend._options)
    assert report("batch", "SubmitServiceJob", sent) == ""
    assert report("sagemaker", "CreateTrainingJob", json.loads(sent["serviceRequestPayload"])) == ""
    assert json.loads(sent["serviceRequestPayload"]) == plan.request, "what plan has shown"
    assert (sent["shareIdentifier"], sent["schedulingPriority"], sent["clientToken"]) == ("nlp", 7, "fault-a1")
    assert sent["retryStrategy"] == {"attempts": 1}
    assert report("batch", "SubmitServiceJob", {**sent, "serviceJobType": 1}) != ""
    assert [note for note in plan.notes if "AWS Batch queue team, share nlp, priority 7" in note]
    assert set(queue.STATUSES) == set(
        botocore.session.get_session().get_service_model("batch").shape_for("ServiceJobStatus").enum
    )
    handle = bench.backend.submit(plan, bundle)
    assert bench.final(handle).state is State.SUCCEEDED
    assert bench.log_texts(handle) == ["done"] and bench.backend.labels(handle) == {"team": "nlp"}


def test_a_long_manifest_is_an_object_and_a_request_that_is_too_long_is_refused(bench: QueueBench) -> None:
    long = {f"name_{n}": "x" * 200 for n in range(99)}
    digits = random.Random(1).randbytes(3000).hex()
    plan, bundle = bench.plan("import sys; print(len(sys.argv[1]))\n", args=[digits])
    assert not [name for name in plan.request["HyperParameters"] if name.startswith(PIECE)]
    handle = bench.backend.submit(plan, bundle)
    assert bench.final(handle).state is State.SUCCEEDED, bench.log_texts(handle)
    assert bench.log_texts(handle) == ["6000"]
    with pytest.raises(BadJob, match="at most 10,240 bytes"):
        bench.plan(hyperparameters=long)


def test_what_cannot_go_through_a_queue_is_refused_at_plan(bench: QueueBench) -> None:
    bench.backend = bench.connect(client="sdk")
    with pytest.raises(BadJob, match="estimator's fit"):
        bench.plan()
    bench.backend = bench.connect(queue=None, queue_share="a")
    with pytest.raises(BadJob, match="works with a queue only"):
        bench.plan()


@pytest.mark.parametrize("times", [1, 3, 99])
def test_a_lost_answer_sends_one_job(bench: QueueBench, times: int) -> None:
    bench.simulator.faults.append(Fault("SubmitServiceJob", 503, "ServiceUnavailable", times=times, committed=True))
    handle = bench.backend.submit(*bench.plan())
    assert [job.arn for job in bench.simulator.batch.jobs.values()] == [handle]
    assert bench.final(handle).state is State.SUCCEEDED
    assert len(bench.simulator.jobs) == 1


def test_a_lost_answer_of_a_job_that_the_list_lacks_stays_unknown_and_is_adopted_later(bench: QueueBench) -> None:
    plan, bundle = bench.plan()
    bench.simulator.faults.append(Fault("SubmitServiceJob", 0, times=99, committed=True))
    bench.simulator.batch.list_late = 1
    with pytest.raises(Unreachable):
        bench.backend.submit(plan, bundle)
    bench.simulator.faults.clear()
    bench.simulator.batch.list_late = 1
    with pytest.raises(Unreachable, match="does not list it yet"):
        bench.backend.submit(plan, bundle)  # the token is known: still no second job
    handle = bench.backend.submit(plan, bundle)
    assert handle == bench.backend.find("fault-a1")
    assert len(bench.simulator.batch.jobs) == len(bench.simulator.jobs) == 1
    other, bundle = bench.plan(args=["another"])
    with pytest.raises(BackendError, match="different contents"):
        bench.backend.submit(other, bundle)


def test_a_refusal_is_final_and_says_why(bench: QueueBench) -> None:
    bench.backend = bench.connect(queue="other")
    with pytest.raises(BackendError, match="Job queue other does not exist") as caught:
        bench.backend.submit(*bench.plan())
    assert not isinstance(caught.value, Unreachable)


def test_a_job_waits_in_the_queue_is_cancelled_there_and_the_next_one_starts(bench: QueueBench) -> None:
    bench.simulator.make_queue(QUEUE, capacity=1)
    first = bench.backend.submit(*bench.plan("import time; time.sleep(600)\n", "first"))
    second = bench.backend.submit(*bench.plan("import time; time.sleep(600)\n", "second"))
    third = bench.backend.submit(*bench.plan(name="third"))
    wait_for(lambda: bench.backend.status(first).state is State.RUNNING, "the first")
    waiting = bench.backend.status(second)
    assert (waiting.state, waiting.reason) == (State.QUEUED, "AWS Batch: RUNNABLE")
    assert list(bench.backend.logs(second)) == [] and bench.backend.remains(second) == {}
    with pytest.raises(BackendError, match="no training job"):
        bench.backend.fetch(second, bench.home / "out")
    bench.backend.cancel(second)
    ended = bench.backend.status(second)
    assert (ended.state, ended.reason) == (State.CANCELLED, "cancelled by cloudtrain")
    bench.backend.cancel(second)  # again
    bench.backend.cancel(first)
    assert bench.final(first).state is State.CANCELLED
    assert bench.final(third).state is State.SUCCEEDED and bench.log_texts(third) == ["done"]


def test_batch_repeats_a_job_without_capacity_and_the_run_waits(bench: QueueBench) -> None:
    bench.simulator.behavior.capacity_errors = 2
    handle = bench.backend.submit(*bench.plan())
    states = []
    wait_for(lambda: states.append(bench.backend.status(handle).state) or states[-1].final, "its end")
    assert states[-1] is State.SUCCEEDED and State.FAILED not in states
    assert len(bench.simulator.jobs) == 3 and bench.log_texts(handle) == ["done"]


def test_what_batch_has_forgotten_is_found_by_the_training_job(bench: QueueBench) -> None:
    handle = bench.backend.submit(
        *bench.plan("import os; open(os.environ['CLOUDTRAIN_MODEL_DIR'] + '/w', 'w').write('7')\n")
    )
    assert bench.final(handle).state is State.SUCCEEDED
    bench.simulator.batch.jobs.clear()
    assert bench.connect().status(handle).state is State.SUCCEEDED
    assert (bench.connect().fetch(handle, bench.home / "out") / "model" / "w").read_text() == "7"
    gone = bench.backend.status(handle[:-4] + "0000")
    assert gone.state is State.LOST and "no service job" in gone.reason


def test_a_lost_history_finds_the_jobs_of_a_queue_by_their_label(bench: QueueBench) -> None:
    handle = bench.backend.submit(*bench.plan(labels={"team": "nlp"}))
    bench.backend.submit(*bench.plan(name="other", labels={"team": "vision"}))
    found = list(bench.backend.labelled("team", "nlp", ()))
    assert [(each.attempt_id, each.handle) for each in found] == [("fault-a1", handle)]
    assert found[0].record["manifest"]
    assert list(bench.backend.labelled("team", "nlp", ("fault-a1",))) == []


def test_a_job_that_changes_its_state_between_two_lists_is_found_once(bench: QueueBench) -> None:
    bench.simulator.make_queue(QUEUE, capacity=0)
    handle = bench.backend.submit(*bench.plan(labels={"team": "nlp"}))
    batch = bench.simulator.batch
    for state, *moves in (
        *((each, (each, following)) for each, following in pairwise(queue.STATUSES)),
        ("RUNNABLE", ("RUNNABLE", "RUNNING"), ("RUNNING", "SUCCEEDED")),
        ("RUNNING", ("SCHEDULED", "RUNNABLE")),  # repeated for insufficient capacity
        ("RUNNING", ("SCHEDULED", "RUNNABLE"), ("FAILED", "SCHEDULED")),
    ):
        batch.jobs[handle.rpartition("/")[2]].status = state
        batch.moves.extend(moves)
        assert [each.handle for each in bench.backend.labelled("team", "nlp", ())] == [handle], (state, moves)
        assert batch.moves == [], "the job has changed its state"


RUNNING, DONE, FAILED = Status(State.RUNNING), Status(State.SUCCEEDED, 0), Status(State.FAILED, 3)
CAPACITY = Status(State.FAILED, None, "no machines", event="capacity")


@pytest.mark.parametrize(
    ("name", "terminated", "training", "state"),
    [
        *((name, False, None, State.QUEUED) for name in queue.QUEUED),
        ("SCHEDULED", False, CAPACITY, State.QUEUED),
        ("RUNNABLE", False, CAPACITY, State.QUEUED),
        ("STARTING", False, None, State.STARTING),
        ("RUNNING", False, RUNNING, State.RUNNING),
        ("RUNNING", False, FAILED, State.RUNNING),  # until Batch has decided
        ("FAILED", False, FAILED, State.FAILED),
        ("FAILED", False, None, State.FAILED),
        ("FAILED", False, Status(State.LOST), State.LOST),
        ("FAILED", True, None, State.CANCELLED),
        ("FAILED", True, Status(State.CANCELLED), State.CANCELLED),
        ("SUCCEEDED", False, DONE, State.SUCCEEDED),
        ("SUCCEEDED", False, RUNNING, State.RUNNING),  # SageMaker's list is a moment behind
        ("SUCCEEDED", False, None, State.SUCCEEDED),
    ],
)
def test_states(name: str, terminated: bool, training: Status | None, state: State) -> None:
    job = {"status": name, "isTerminated": terminated, "statusReason": "why"}
    assert queue.parse_status(job, training).state is state


def test_doctor_looks_at_the_queue(bench: QueueBench) -> None:
    def said(**more) -> list[str]:
        return [problem.message for problem in bench.connect(**more).check() if problem.path.endswith(".queue")]

    assert said() == []
    assert said(queue="other") == ["there is no AWS Batch queue other"]
    bench.simulator.batch.make_queue("off", state="DISABLED")
    bench.simulator.batch.make_queue("containers", jobQueueType="ECS")
    assert said(queue="off") == ["the queue off takes no jobs: it is DISABLED, VALID"]
    assert said(queue="containers") == ["the queue containers is of type ECS, not SAGEMAKER_TRAINING"]


def test_who_submits_to_a_queue_may_not_create_training_jobs(tmp_path: Path) -> None:
    options = {"role": ROLE, "bucket": BUCKET, "region": REGION, "account": "123456789012", "queue": QUEUE}
    policy = SagemakerBackend(options, tmp_path).policy("submit", None)
    by_name = {statement["Sid"]: statement for statement in policy["Statement"]}
    assert by_name["QueueJobs"]["Resource"] == [
        "arn:aws:batch:us-east-1:123456789012:job-queue/team",
        "arn:aws:batch:us-east-1:123456789012:service-job/*",
    ]
    actions = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert "iam:PassRole" in actions and not actions & {"sagemaker:CreateTrainingJob", "sagemaker:StopTrainingJob"}
    _, notes = SagemakerBackend(options, tmp_path).enforcement([])
    assert [note for note in notes if "queue of AWS Batch" in note]
    batch = botocore.session.get_session().get_service_model("batch")
    for action in actions:
        service, _, operation = action.partition(":")
        assert service != "batch" or operation in batch.operation_names
