"""What SageMaker says of a job, as a state: Stopped and Failed have many meanings."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from cloudtrain.backends.sagemaker.status import ARN, console_url, parse_status, seconds_since_end
from cloudtrain.diagnosis.judge import judge
from cloudtrain.diagnosis.verdict import End
from cloudtrain.events import ENDED, State

NAME = "arn:aws:sagemaker:us-east-1:123456789012:training-job/tiny-a1"


def training_job(status: str, secondary: str = "", reason: str = "", *history: str, **fields) -> dict:
    changes = [{"Status": name} for name in history]
    description = {"TrainingJobName": "tiny-a1", "TrainingJobArn": NAME, "TrainingJobStatus": status}
    return {
        **description,
        "SecondaryStatus": secondary,
        "FailureReason": reason,
        "SecondaryStatusTransitions": changes,
        **fields,
    }


@pytest.mark.parametrize(
    ("found", "state", "code"),
    [
        (training_job("InProgress", "Pending"), State.QUEUED, None),
        (training_job("InProgress", "Starting"), State.STARTING, None),
        (training_job("InProgress", "Downloading"), State.STARTING, None),
        (training_job("InProgress", "Interrupted"), State.STARTING, None),
        (training_job("InProgress", "Training"), State.RUNNING, None),
        (training_job("InProgress", "Uploading"), State.RUNNING, None),
        (training_job("Stopping", "Stopping"), State.STOPPING, None),
        (training_job("Completed", "Completed"), State.SUCCEEDED, 0),
        (training_job("Stopped", "Stopped", "", "Training", "Stopping", "Stopped"), State.CANCELLED, None),
        (training_job("Stopped", "MaxRuntimeExceeded", "", "Training", "MaxRuntimeExceeded"), State.TIMED_OUT, None),
        (training_job("Stopped", "Stopped", "", "Training", "MaxRuntimeExceeded", "Stopped"), State.TIMED_OUT, None),
        (training_job("Stopped", "MaxWaitTimeExceeded", "", "Starting", "MaxWaitTimeExceeded"), State.TIMED_OUT, None),
        (training_job("Stopped", "MaxWaitTimeExceeded", "", "Training", "Interrupted"), State.PREEMPTED, None),
        (training_job("Stopped", "Stopped", "", "Training", "Interrupted", "Stopped"), State.PREEMPTED, None),
        (training_job("Stopped", "Stopped", "", "Interrupted", "Stopping", "Stopped"), State.CANCELLED, None),
        (training_job("Failed", "Failed", "AlgorithmError: , exit code: 3"), State.FAILED, 3),
        (
            training_job("Failed", "Failed", "AlgorithmError: said [cloudtrain FAILED 75 script], exit code: 75"),
            State.FAILED,
            75,
        ),
        (
            training_job("Failed", "Failed", "AlgorithmError: [cloudtrain TIMED_OUT 75 launcher], exit code: 75"),
            State.TIMED_OUT,
            75,
        ),
        (
            training_job("Failed", "Failed", "AlgorithmError: a [cloudtrain LOST - launcher], exit code: 69"),
            State.LOST,
            None,
        ),
        (
            training_job("Failed", "Failed", "AlgorithmError: a [cloudtrain NEWER 1 script], exit code: 1"),
            State.FAILED,
            1,
        ),
        (
            training_job("Failed", "Failed", "CapacityError: Unable to provision requested ML compute capacity"),
            State.FAILED,
            None,
        ),
        (training_job("Failed", "Failed", "InternalServerError: We encountered an internal error"), State.LOST, None),
        (
            training_job("Failed", "Failed", "ClientError: Please use an instance type with more memory"),
            State.FAILED,
            None,
        ),
        (training_job("Deleting"), State.LOST, None),
    ],
)
def test_states(found: dict, state: State, code: int | None) -> None:
    status = parse_status(found)
    assert (status.state, status.exit_code) == (state, code)
    assert status.reason or state in (State.SUCCEEDED, State.FAILED, State.TIMED_OUT) or not state.final


def test_the_reason_is_the_launchers_own() -> None:
    failure_reason = "AlgorithmError: rank 1 exited with code 41 [cloudtrain FAILED 41 script], exit code: 41"
    assert parse_status(training_job("Failed", "Failed", failure_reason)).reason == "rank 1 exited with code 41"
    assert "another instance_type" in parse_status(training_job("Failed", "Failed", "CapacityError: none")).reason


@pytest.mark.parametrize(
    "said",
    [
        "CapacityError: Unable to provision requested ML compute capacity",
        "InsufficientCapacity: none",
        "InsufficientInstanceCapacity. We have none",
        "InsufficientCapacityError: none",
    ],
)
def test_that_there_were_no_machines_is_told_as_such(said: str) -> None:
    status = parse_status(training_job("Failed", "Failed", said))
    assert (status.state, status.event) == (State.FAILED, "capacity") and "no such machines" in status.reason


@pytest.mark.parametrize(
    "said",
    [
        "AlgorithmError: CapacityError: of a script's own, exit code: 1",
        "CapacityError: a script wrote this [cloudtrain FAILED 1 script], exit code: 1",
        "ClientError: Capacity",
    ],
)
def test_what_only_looks_like_it(said: str) -> None:
    assert parse_status(training_job("Failed", "Failed", said)).event == ""


GONE = ("Starting", "Pending")
SAID = {  # what SageMaker answers, and what a person reads
    "interrupted": (
        training_job("InProgress", "Interrupted"),
        State.STARTING,
        "SageMaker reclaimed the spot machine and",
    ),
    "restarting": (training_job("InProgress", "Restarting"), State.STARTING, "SageMaker had an internal error"),
    "warm": (
        training_job(
            "Completed",
            "Completed",
            WarmPoolStatus={"Status": "Available"},
            ResourceConfig={"InstanceCount": 1, "KeepAlivePeriodInSeconds": 600},
        ),
        State.SUCCEEDED,
        "its machines stay warm for the next job for at most 600 s",
    ),
    "reused": (
        training_job("Completed", "Completed", WarmPoolStatus={"Status": "Reused", "ReusedByJob": "next-a1"}),
        State.SUCCEEDED,
        "its warm machines are used by next-a1",
    ),
    "cooled": (training_job("Completed", WarmPoolStatus={"Status": "Terminated"}), State.SUCCEEDED, ""),
    "stopped": (training_job("Stopped", "Stopped", "", "Training", "Stopping"), State.CANCELLED, "stopped on request"),
    "pending": (
        training_job("Stopped", "Stopped", "", *GONE, StoppingCondition={"MaxPendingTimeInSeconds": 1800}),
        State.TIMED_OUT,
        "SageMaker ended the job: it found no machines within max_pending (1800 s)",
    ),
    "stopped while pending": (
        training_job("Stopped", "Stopped", "", *GONE, "Stopping", StoppingCondition={"MaxPendingTimeInSeconds": 1800}),
        State.CANCELLED,
        "stopped on request",
    ),
    "no spot machine": (
        training_job("Stopped", "MaxWaitTimeExceeded", "", "Starting", "MaxWaitTimeExceeded"),
        State.TIMED_OUT,
        "SageMaker found no spot machine before the job's deadline (MaxWaitTimeInSeconds)",
    ),
    "spot machine lost": (
        training_job("Stopped", "Stopped", "", "Training", "Interrupted", "Stopped"),
        State.PREEMPTED,
        "SageMaker reclaimed the spot machine",
    ),
    "unhealthy": (
        training_job("Failed", "Failed", "ClientError: the infrastructure health check failed on algo-2"),
        State.LOST,
        "SageMaker's health check found a machine unhealthy: ",
    ),
    "a script's health check": (
        training_job("Failed", "Failed", "AlgorithmError: health check of the tokenizer, exit code: 3"),
        State.FAILED,
        "AlgorithmError: health check",
    ),
    "no image": (
        training_job(
            "Failed",
            "Failed",
            "ClientError: Cannot pull algorithm container. Either the image does not exist or its permissions are incorrect.",
            AlgorithmSpecification={"TrainingImage": "123.dkr/train:1"},
        ),
        State.FAILED,
        "SageMaker cannot pull the image 123.dkr/train:1: ",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_happened_is_said_in_a_persons_words(name: str) -> None:
    found, state, reason = SAID[name]
    status = parse_status(found)
    assert status.state is state and status.reason.startswith(reason) and (reason or not status.reason)


VERDICTS = {
    "no image": "image-pull",
    "unhealthy": "lost-node",
    "pending": "capacity",
    "no spot machine": "capacity",
    "spot machine lost": "spot-loss",
}


def test_what_sagemaker_ended_has_its_verdict() -> None:
    for name, label in VERDICTS.items():
        status = parse_status(SAID[name][0])
        assert judge(End.from_status(status, None), []).label == label


def test_what_is_billed_counts_every_machine() -> None:
    job = training_job("Completed", "Completed", BillableTimeInSeconds=90, ResourceConfig={"InstanceCount": 4})
    assert parse_status(job).billable_s == 360
    assert parse_status(training_job("Completed", "Completed", BillableTimeInSeconds=0)).billable_s == 0
    assert parse_status(training_job("InProgress", "Starting")).billable_s is None


def test_times_are_utc() -> None:
    moment = datetime(2026, 11, 21, 12, 0, 0, 500, tzinfo=timezone(timedelta(hours=2)))
    status = parse_status(training_job("Completed", "Completed", TrainingStartTime=moment, TrainingEndTime=moment))
    assert status.started_at == status.ended_at == "2026-11-21T10:00:00.000500Z"
    assert parse_status(training_job("InProgress", "Training", TrainingStartTime=moment)).ended_at is None
    assert seconds_since_end(training_job("InProgress", "Training")) is None
    assert (seconds_since_end(training_job("Completed", TrainingEndTime=datetime.now(UTC))) or 0) < 100


@pytest.mark.parametrize(
    ("partition", "host"),
    [
        ("aws", "us-east-1.console.aws.amazon.com"),
        ("aws-cn", "console.amazonaws.cn"),
        ("aws-us-gov", "amazonaws-us-gov"),
    ],
)
def test_the_console_of_each_partition(partition: str, host: str) -> None:
    arn = NAME.replace("arn:aws:", f"arn:{partition}:")
    assert ARN.fullmatch(arn)
    address = console_url({**training_job("Completed"), "TrainingJobArn": arn}) or ""
    assert host in address and address.endswith("#/jobs/tiny-a1")


def test_the_end_of_a_loss_is_known_where_sagemaker_has_it():
    times = {
        "TrainingStartTime": datetime(2026, 11, 26, tzinfo=UTC),
        "TrainingEndTime": datetime(2026, 11, 26, 1, tzinfo=UTC),
    }
    reason = "AlgorithmError: a [cloudtrain LOST - launcher], exit code: 69"
    known = parse_status(training_job("Failed", "Failed", reason, **times))
    assert (known.state, known.event, known.ended_at) == (State.LOST, ENDED, "2026-11-26T01:00:00.000000Z")
    modified = {"LastModifiedTime": times["TrainingEndTime"]}
    assert parse_status(training_job("Failed", "Failed", "InternalServerError: x", **modified)).event == ""
