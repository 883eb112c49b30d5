"""Calls of AWS through boto3: bounds of their answers, and what is known of a request after its last try."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("boto3")

from cloudtrain.backends import aws, http
from cloudtrain.backends.aws import Aws, AwsNoService
from cloudtrain.backends.sagemaker import submission
from cloudtrain.errors import Unreachable
from cloudtrain.testing.clock import VirtualClock
from tests.backends.test_http import send, serving

LONG = b'{"TrainingJobName": "' + b"x" * 20_000 + b'"}'


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from botocore.retries import standard

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    return


def connect(url: str) -> Aws:
    return Aws("sagemaker", "us-east-1", None, url, VirtualClock())


def describe(found: Aws) -> object:
    return found.call("sagemaker", "describe_training_job", TrainingJobName="a")


def test_an_answer_has_a_bound_of_size_and_a_stream_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler: send(handler, 200, LONG)) as (url, received):
        found = connect(url)
        assert describe(found)["TrainingJobName"] == "x" * 20_000  # type: ignore[index]
        monkeypatch.setattr(http, "ANSWER_BYTES", 10_000)
        with pytest.raises(Unreachable, match=r"the answer of 127.0.0.1:\d+ is over the limit") as caught:
            describe(found)
        assert "test" not in caught.value.message and len(received) == 2
        assert found.call("s3", "get_object", Bucket="b", Key="k")["Body"].read() == LONG


def test_an_answer_has_a_bound_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda handler: send(handler, 200, LONG)) as (url, _):
        found = connect(url)
        monkeypatch.setattr(http, "ANSWER_S", -1.0)
        with pytest.raises(Unreachable, match="is over the limit of"):
            describe(found)


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    answers = [lambda h: send(h, 200, LONG[:50], len(LONG)), lambda h: send(h, 200, LONG)]
    with serving(lambda handler: answers.pop(0)(handler)) as (url, received):
        assert describe(connect(url)) and len(received) == 2


@pytest.mark.parametrize("queue", [False, True])
def test_a_refused_connection_has_sent_no_job(queue: bool, tmp_path: Path) -> None:
    found = connect("http://127.0.0.1:9")
    with pytest.raises(AwsNoService, match="cannot be reached"):
        if queue:
            from cloudtrain.backends.sagemaker.queue import Queue

            request = {"TrainingJobName": "a", "Tags": [], "StoppingCondition": {"MaxRuntimeInSeconds": 60}}
            submission.submit_to_queue(Queue(found, {"queue": "q"}, tmp_path), "a", request)
        else:
            names = {"TrainingJobName": "a", "RoleArn": "arn:aws:iam::123456789012:role/role"}
            output = {
                "OutputDataConfig": {"S3OutputPath": "s3://bucket/o"},
                "StoppingCondition": {"MaxRuntimeInSeconds": 60},
            }
            request = {**names, **output, "ResourceConfig": {"VolumeSizeInGB": 1}, "AlgorithmSpecification": {}}
            request["AlgorithmSpecification"] = {"TrainingInputMode": "File"}
            submission.submit_job(found, None, "a", request, {"client": "boto3"})  # type: ignore[arg-type]


def test_a_refused_connection_after_a_lost_answer_may_have_sent_it() -> None:
    def once(handler) -> None:
        handler.server.socket.close()  # nothing listens there any more
        send(handler, 500)

    with serving(once) as (url, received):
        with pytest.raises(aws.AwsUnreachable, match="cannot be reached") as caught:
            describe(connect(url))
    assert len(received) == 1 and not isinstance(caught.value, AwsNoService)
