"""boto3 runs against the SageMaker simulator, in a hand-written script that imports nothing of cloudtrain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.simulators.sagemaker import host, training_job
from cloudtrain.simulators.sagemaker.server import Simulator
from cloudtrain.testing.clock import VirtualClock


@pytest.fixture
def simulator(tmp_path: Path):
    simulator = Simulator(tmp_path / "hosts")
    yield simulator
    simulator.close()


def test_a_hand_written_script_passes(simulator: Simulator, tmp_path: Path) -> None:
    script = Path(__file__).with_name("by_hand_sagemaker.py")
    env = {**os.environ, **simulator.environ, "PYTHONPATH": ""}
    ran = subprocess.run([sys.executable, "-I", script], env=env, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    two = seen["two"]
    assert two["status"] == "Completed" and two["environment"] == {"COLOUR": "blue"}
    assert two["transitions"] == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert two["tags"] == [{"Key": "team", "Value": "nlp"}]
    assert sorted(two["lines"]) == ["algo-1", "algo-2"]
    assert two["lines"]["algo-1"][0].endswith("of 2")
    assert two["lines"]["algo-1"][1:] == two["lines"]["algo-2"][1:] == ["given 3.0e-4 blue hello", "checkpoint None"]
    assert two["model"] == ["weights", "weights"] and two["checkpoint"] == "7"
    assert (two["again"], two["stop"]) == ("ResourceInUse", "ValidationException")
    assert seen["bad"]["status"] == "Failed"
    assert seen["bad"]["reason"] == "AlgorithmError: it did not want to, exit code: 3"
    assert seen["bad"]["lines"]["algo-1"][2] == "checkpoint 7", "another job finds the checkpoints of that prefix"
    assert (seen["long"], seen["limit"]) == ("Stopped", "MaxRuntimeExceeded")
    assert (seen["unknown"], seen["spot"]) == ("ValidationException", "ValidationException")
    assert seen["paged"] == ["limit", "long", "bad", "two"], "the newest first, a NextToken for each page"
    assert seen["sorted"] == ["bad", "limit"] and set(seen["later"]) <= {"limit", "long", "bad"}
    assert seen["stopped"] == ["MaxRuntimeExceeded"], "the newest job, filtered after the page was cut"
    assert (seen["too many"], seen["token"]) == ("ValidationException", "ValidationException")
    assert seen["listed"] == ["bad", "limit", "long", "two"] and seen["ours"] == []


def test_the_simulator_as_a_program_says_how_it_is_found(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cloudtrain.simulators.sagemaker", "--bucket", "mine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        exported = dict(process.stdout.readline().removeprefix("export ").strip().split("=", 1) for _ in range(4))
        client = "import boto3; print([b['Name'] for b in boto3.client('s3').list_buckets()['Buckets']])"
        env = {**os.environ, **exported}
        ran = subprocess.run([sys.executable, "-c", client], env=env, capture_output=True, text=True, timeout=120)
        process.terminate()
    assert ran.stdout.strip() == "['mine']", ran.stderr


def test_a_checkpoint_that_vanishes_while_it_is_uploaded_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A job deletes old checkpoints at any moment, also between the listing of its files and their upload."""
    uploaded = []
    host = SimpleNamespace(base=tmp_path, synced={})
    job = SimpleNamespace(
        request={"CheckpointConfig": {"S3Uri": "s3://bucket/run"}},
        _hosts=[host],
        _call=lambda *_, **given: uploaded.append((given["Key"], given["Body"])),
    )
    kept = tmp_path / "checkpoints" / "kept"
    kept.parent.mkdir()
    kept.write_bytes(b"weights")
    listed = [(kept.with_name("gone"), "gone"), (kept, "kept")]
    monkeypatch.setattr(training_job, "iter_files", lambda _: listed)
    training_job.TrainingJob._sync(job)
    assert uploaded == [("run/kept", b"weights")] and list(host.synced) == ["kept"]


def test_a_hand_written_script_sends_through_a_queue_of_aws_batch(simulator: Simulator) -> None:
    simulator.make_queue("one", capacity=1)
    script = Path(__file__).with_name("by_hand_batch.py")
    env = {**os.environ, **simulator.environ, "PYTHONPATH": ""}
    ran = subprocess.run([sys.executable, "-I", script], env=env, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert (seen["queue"], seen["no queue"]) == ("SAGEMAKER_TRAINING", [])
    assert (seen["twice"], seen["states"]) == ("ClientException", ["RUNNING", "RUNNABLE"])
    assert seen["tags"] == {"team": "nlp"} and seen["listed"] == [["first"], ["second"], ["first"]]
    assert seen["terminated"] == ["FAILED", True, "enough"] and seen["second"] == ["SUCCEEDED", "Completed"]
    assert seen["name"].startswith("AWSBatchsecond") and len(seen["name"]) == 46
    assert seen["bad"] == ["FAILED", "Received status from SageMaker: AlgorithmError: exit code: 3", 1]
    assert (seen["attempts"], seen["before its start"], seen["refused"]) == (2, ["FAILED", True], "FAILED")
    assert (seen["too long"], seen["unknown"]) == ("ClientException", ["ClientException", "ClientException"])


class Service:
    """CloudWatch as LogStream calls it: takes events in the order of their times only, and fails a given number of times."""

    def __init__(self, failures: int) -> None:
        self.failures, self.taken = failures, []

    def __call__(self, service: str, operation: str, **values) -> None:
        if operation != "put_log_events":
            return
        times = [event["timestamp"] for event in values["logEvents"]]
        if times != sorted(times):
            raise ValueError("Log events in a single PutLogEvents request must be in chronological order.")
        if self.failures:
            self.failures -= 1
            raise ConnectionError("injected")
        self.taken += [event["message"] for event in values["logEvents"]]


@pytest.mark.parametrize("failures", [0, 1])
def test_no_line_of_a_host_is_lost_to_a_failed_request_or_a_clock_that_is_set_back(failures: int) -> None:
    clock = VirtualClock()
    service = Service(failures)
    stream = host.LogStream("one", service, host.Behavior(), clock)
    with stream._lock:  # all three lines go into one request
        stream._lock, lock = nullcontext(), stream._lock
        for line, change_s in ((b"first", -1.0), (b"second", 2.0), (b"third", 999.0)):
            stream.write(line)
            clock.jump(change_s)
        stream._lock = lock
    stream.close()
    assert service.taken == ["first", "second", "third"] and stream.failure is None


def test_a_host_whose_log_cannot_be_sent_has_not_completed() -> None:
    stream = host.LogStream("one", Service(failures=1000), host.Behavior())
    stream.write(b"line")
    stream.close()
    assert isinstance(stream.failure, ConnectionError)
