"""Send training jobs through a queue of AWS Batch: the service job's request, its status, and its training job.

A service job holds a CreateTrainingJob request. AWS Batch creates the training job when the queue lets it, under a name of
its own that begins with AWSBatch. The handle is the service job's ARN; the training job's ARN is an answer of Batch.

Sources (2026-11-25): botocore 1.43.117's model of batch; below https://docs.aws.amazon.com/batch/latest/userguide/:
service-job-submit.html, service-job-status.html, service-job-retries.html (Batch itself repeats a job that failed for
insufficient capacity, without an end), service_limits.html for MAX_PAYLOAD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.aws import DENIED, Aws, AwsError
from cloudtrain.errors import Problem
from cloudtrain.events import State, Status, short_reason

MAX_PAYLOAD = 10 * 1024  # bytes
PIECES = 2048  # characters of a manifest in hyperparameters; a longer one is an object in S3
ARN = re.compile(r"arn:aws[a-z-]*:batch:[a-z0-9-]+:(?P<account>\d{12}):service-job/(?P<id>[\w-]+)")
QUEUED = ("SUBMITTED", "PENDING", "RUNNABLE", "SCHEDULED")
STATUSES = (*QUEUED, "STARTING", "RUNNING", "SUCCEEDED", "FAILED")  # in the order of a job's life
LIVE = ("RUNNABLE", "SCHEDULED", "STARTING", "RUNNING")
FINAL = ("SUCCEEDED", "FAILED")
PATH = "options.sagemaker.queue"


def is_service_job(handle: str) -> bool:
    """Return whether a handle is that of a job that was sent to a queue."""
    return ARN.fullmatch(handle) is not None


def encode_payload(request: Mapping[str, Any]) -> str:
    """Return a CreateTrainingJob request as the text that a service job holds."""
    return json.dumps(request, separators=(",", ":"), ensure_ascii=False)


def build_request(request: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SubmitServiceJob request for a CreateTrainingJob request; pure data.

    The client token is the attempt's name, so that AWS Batch takes each attempt once.
    """
    name = str(request["TrainingJobName"])
    wanted = {"shareIdentifier": options.get("queue_share"), "schedulingPriority": options.get("queue_priority")}
    return {
        "jobName": name,
        "jobQueue": options["queue"],
        "serviceJobType": "SAGEMAKER_TRAINING",
        "retryStrategy": {"attempts": 1},  # the next attempt is ours: a run of its own in the history
        **{field: value for field, value in wanted.items() if value is not None},
        "tags": {tag["Key"]: tag["Value"] for tag in request["Tags"]},
        "clientToken": name,
        "serviceRequestPayload": encode_payload(request),
    }


def find_problems(request: Mapping[str, Any], options: Mapping[str, Any]) -> list[Problem]:
    """Return what of a request or of the options cannot go through a queue."""
    if not options.get("queue"):
        names = [name for name in ("queue_share", "queue_priority") if options.get(name) is not None]
        return [Problem("works with a queue only", f"options.sagemaker.{name}", f"set {PATH}") for name in names]
    problems = []
    if options.get("client") == "sdk":
        message = "cannot send to a queue of AWS Batch: an estimator's fit() creates the job itself"
        problems.append(Problem(message, "options.sagemaker.client", "boto3, or auto"))
    size = len(encode_payload(request).encode())
    if size > MAX_PAYLOAD:
        message = f"AWS Batch takes requests of at most {MAX_PAYLOAD:,} bytes, this one has {size:,}"
        problems.append(Problem(message, PATH, "fewer metrics, labels, inputs or hyperparameters, or no queue"))
    return problems


def note(options: Mapping[str, Any]) -> str:
    """Return a plan's note on how its request is sent."""
    more = [f"{key} {options[name]}" for key, name in (("share", "queue_share"), ("priority", "queue_priority"))
            if options.get(name) is not None]  # fmt: skip
    where = ", ".join([f"the AWS Batch queue {options['queue']}", *more])
    return f"sent by boto3 to {where} (SubmitServiceJob with this request as payload); Batch starts it when the queue allows"


class Queue:
    """The service jobs of one account and region.

    Args:
        memory: folder that keeps which training job a service job has become: AWS Batch forgets ended jobs.
    """

    def __init__(self, aws: Aws, options: Mapping[str, Any], memory: Path) -> None:
        self._aws, self._options, self._memory = aws, options, memory

    def submit(self, request: Mapping[str, Any]) -> str:
        """Send a CreateTrainingJob request; return the service job's ARN. Blocking; raises AwsError."""
        answer = self._aws.call("batch", "submit_service_job", **build_request(request, self._options))
        return str(answer["jobArn"])

    def find(self, attempt_id: str) -> Mapping[str, Any] | None:
        """Return the description of the service job of an attempt, None where the queue has none; blocking."""
        query = {"jobQueue": self._options["queue"], "filters": [{"name": "JOB_NAME", "values": [attempt_id]}]}
        found = [job for job in self._list(**query) if job["jobName"] == attempt_id]
        return self._describe(str(found[-1]["jobId"])) if found else None  # the newest come first

    def all(self) -> Iterator[Mapping[str, Any]]:
        """Yield one summary of each service job that the queue still knows; blocking.

        AWS Batch lists one state at a time, and a job may change its state between two lists. The states come in the order
        of a job's life, and twice: a job that Batch repeats goes back to RUNNABLE, whose list was read already.
        """
        seen: set[str] = set()
        for status in (*STATUSES, *STATUSES):
            for job in self._list(jobQueue=self._options["queue"], jobStatus=status):
                if job["jobArn"] not in seen:
                    seen.add(job["jobArn"])
                    yield job

    def live(self) -> dict[str, Mapping[str, Any]]:
        """Return ARN -> summary of the queue's jobs that wait for machines or run, {} where listing is denied; blocking.

        A job that Batch moves back to RUNNABLE between two lists is left out: the caller asks for it by its handle.
        A filter by time would take fewer calls, but AWS's words leave open which side of the time it returns.
        """
        try:
            listed = [self._list(jobQueue=self._options["queue"], jobStatus=status) for status in LIVE]
            return {str(job["jobArn"]): job for jobs in listed for job in jobs}
        except AwsError as error:
            if error.code in DENIED:
                return {}
            raise

    def describe(self, handle: str) -> Mapping[str, Any] | None:
        """Return DescribeServiceJob's answer, None where AWS Batch has no such job; blocking. Raises AwsError."""
        match = ARN.fullmatch(handle)
        job = self._describe(match["id"]) if match else None
        if match and job and (arn := training_job(job)):
            path = self._memory / match["id"]
            if not path.exists() or path.read_text("utf-8") != arn:
                self._memory.mkdir(parents=True, exist_ok=True)
                path.write_text(arn, "utf-8")
        return job

    def training_job(self, handle: str) -> str | None:
        """Return the ARN of a service job's training job, None before it has one; blocking."""
        job = self.describe(handle)
        if job is not None:
            return training_job(job)
        try:
            return (self._memory / handle.rpartition("/")[2]).read_text("utf-8")
        except FileNotFoundError:
            return None

    def cancel(self, handle: str) -> None:
        """End a service job and its training job; one that has ended, or is gone, is left alone. Raises AwsError."""
        try:
            job_id = handle.rpartition("/")[2]
            self._aws.call("batch", "terminate_service_job", jobId=job_id, reason="cancelled by cloudtrain")
        except AwsError as error:
            job = self.describe(handle) if error.code == "ClientException" else {"status": ""}
            if job is not None and job["status"] not in FINAL:
                raise

    def _list(self, **query: Any) -> Iterator[Mapping[str, Any]]:
        while True:
            answer = self._aws.call("batch", "list_service_jobs", maxResults=100, **query)
            yield from answer["jobSummaryList"]
            if not answer.get("nextToken"):
                return
            query["nextToken"] = answer["nextToken"]

    def _describe(self, job_id: str) -> Mapping[str, Any] | None:
        try:
            return dict(self._aws.call("batch", "describe_service_job", jobId=job_id))
        except AwsError as error:
            if error.code == "ClientException" and re.search("not found|not exist", error.message):
                return None
            raise


def training_job(job: Mapping[str, Any]) -> str | None:
    """Return the ARN of a described service job's training job, None before it has one."""
    resource = (job.get("latestAttempt") or {}).get("serviceResourceId") or {}
    return str(resource["value"]) if resource.get("name") == "TrainingJobArn" else None


def parse_status(job: Mapping[str, Any], training: Status | None) -> Status:
    """Return the status of a service job; `training` is that of its training job, None before it has one.

    The end of a training job is the end of the service job only when AWS Batch says so: Batch repeats one that failed for
    insufficient capacity.
    """
    name, reason = str(job["status"]), str(job.get("statusReason") or "")
    text = short_reason(f"AWS Batch: {name}" + (f": {reason}" if reason else ""))
    if name in QUEUED:
        return Status(State.QUEUED, None, text, url=training.url if training and not training.state.final else None)
    if name in FINAL and training is not None:
        return training
    if name == "SUCCEEDED":
        return Status(State.SUCCEEDED, 0, text)
    if name == "FAILED":
        stopped = bool(job.get("isTerminated"))
        return Status(State.CANCELLED if stopped else State.FAILED, None, short_reason(reason) if stopped else text)
    if training is not None and not training.state.final:
        return training
    return Status(State.STARTING if name == "STARTING" else State.RUNNING, None, text)
