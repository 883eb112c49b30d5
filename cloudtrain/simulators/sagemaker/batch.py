"""Simulates queues of AWS Batch for training jobs: service jobs, their states, and the training jobs that they become.

States, the retry after insufficient capacity and the names AWSBatch... of training jobs are those of AWS's pages
service-job-status.html, service-job-retries.html and service-job-events.html (2026-11-25); the fields those of botocore's
model. A queue looks for what has changed at each request.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.clock import SYSTEM
from cloudtrain.simulators.sagemaker.job_list import AwsError
from cloudtrain.simulators.sagemaker.training_job import FINAL, TrainingJob

OPERATIONS = ("SubmitServiceJob", "DescribeServiceJob", "ListServiceJobs", "TerminateServiceJob", "DescribeJobQueues")
PATHS = {f"/v1/{name.lower()}": name for name in OPERATIONS}
STATES = {"Starting": "SCHEDULED", "Pending": "SCHEDULED", "Downloading": "STARTING"}  # others: RUNNING
MAX_PAYLOAD = 10 * 1024


@dataclass
class ServiceJob:
    """A service job and the training jobs that it has become, the newest last."""

    request: Mapping[str, Any]
    job_id: str
    arn: str
    status: str = "SUBMITTED"
    reason: str = ""
    terminated: bool = False
    created: float = field(default_factory=SYSTEM.now)
    trained: list[TrainingJob] = field(default_factory=list)


class Batch:
    """The queues of one account; `create` makes a training job and returns it."""

    def __init__(self, region: str, account: str, create: Callable[[Mapping[str, Any]], TrainingJob]) -> None:
        self._region, self._account, self._create = region, account, create
        self.queues: dict[str, dict[str, Any]] = {}
        self.capacity: dict[str, int] = {}  # training jobs that a queue runs at the same time
        self.jobs: dict[str, ServiceJob] = {}
        self.list_late = 0  # so many of the next lists lack the newest job
        # (state, next): after the next list of a state, the newest job is in `next`
        self.moves: list[tuple[str, str]] = []
        self._lock = threading.RLock()

    def make_queue(self, name: str, capacity: int = 100, **more: Any) -> None:
        """Create a queue; `more` replaces fields of its description."""
        arn = f"arn:aws:batch:{self._region}:{self._account}:job-queue/{name}"
        environment = f"arn:aws:batch:{self._region}:{self._account}:service-environment/training"
        self.queues[name] = {
            "jobQueueName": name,
            "jobQueueArn": arn,
            "state": "ENABLED",
            "status": "VALID",
            "priority": 1,
            "jobQueueType": "SAGEMAKER_TRAINING",
            "computeEnvironmentOrder": [],
            "serviceEnvironmentOrder": [{"order": 1, "serviceEnvironment": environment}],
            **more,
        }
        self.capacity[name] = capacity

    def answer(self, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; raises AwsError."""
        with self._lock:
            self._advance()
            handler: Callable[[Mapping[str, Any]], dict[str, Any]] = getattr(self, f"_{operation}")
            return handler(request)

    def _SubmitServiceJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        queue = self._queue(request["jobQueue"])
        if queue["state"] != "ENABLED":
            raise AwsError("ClientException", f"Job queue {queue['jobQueueName']} is DISABLED")
        payload = request["serviceRequestPayload"]
        if len(payload.encode()) > MAX_PAYLOAD:
            raise AwsError("ClientException", f"serviceRequestPayload must be at most {MAX_PAYLOAD} bytes")
        if any(job.request.get("clientToken") == request.get("clientToken") for job in self.jobs.values()):
            raise AwsError("ClientException", "A request with this clientToken was received already")
        job_id = str(uuid.uuid4())
        arn = f"arn:aws:batch:{self._region}:{self._account}:service-job/{job_id}"
        self.jobs[job_id] = ServiceJob({**request, "jobQueue": queue["jobQueueArn"]}, job_id, arn)
        self._advance()
        return {"jobArn": arn, "jobName": request["jobName"], "jobId": job_id}

    def _DescribeServiceJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(request)
        kept = ("retryStrategy", "schedulingPriority", "shareIdentifier", "serviceRequestPayload", "tags")
        attempts = [
            {"serviceResourceId": {"name": "TrainingJobArn", "value": training.arn}}
            for training in job.trained
            if training.status in FINAL
        ]
        return {
            **self._summary(job),
            **{name: job.request[name] for name in kept if name in job.request},
            "jobQueue": job.request["jobQueue"],
            "attempts": attempts,
            "isTerminated": job.terminated,
        }

    def _ListServiceJobs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        queue = self._queue(request["jobQueue"])
        jobs = [job for job in self.jobs.values() if job.request["jobQueue"] == queue["jobQueueArn"]]
        if self.list_late and jobs:
            self.list_late -= 1
            jobs = jobs[:-1]
        if filters := request.get("filters"):
            if len(filters) > 1 or filters[0]["name"] != "JOB_NAME":
                raise AwsError("ClientException", "the simulator filters by one JOB_NAME only")
            wanted = filters[0]["values"][0].lower()
            start = wanted.removesuffix("*")
            names = [(job, job.request["jobName"].lower()) for job in jobs]
            jobs = [job for job, name in names if name == wanted or (start != wanted and name.startswith(start))]
        else:
            jobs = [job for job in jobs if job.status == (request.get("jobStatus") or "RUNNING")]
        first, size = int(request.get("nextToken") or 0), int(request.get("maxResults") or 100)
        page = sorted(jobs, key=lambda job: -job.created)[first : first + size]
        more = {"nextToken": str(first + size)} if first + size < len(jobs) else {}
        answer = {"jobSummaryList": [self._summary(job) for job in page], **more}
        if self.moves and self.moves[0][0] == request.get("jobStatus"):
            list(self.jobs.values())[-1].status = self.moves.pop(0)[1]
        return answer

    def _TerminateServiceJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(request)
        if job.status in ("SUCCEEDED", "FAILED"):
            return {}
        job.terminated, job.reason = True, request["reason"]
        if job.trained and job.trained[-1].status not in FINAL:
            job.trained[-1].stop()
        else:
            job.status = "FAILED"
        return {}

    def _DescribeJobQueues(self, request: Mapping[str, Any]) -> dict[str, Any]:
        named = [name.rpartition("/")[2] for name in request.get("jobQueues") or self.queues]
        return {"jobQueues": [self.queues[name] for name in named if name in self.queues]}

    def _summary(self, job: ServiceJob) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "jobArn": job.arn,
            "jobId": job.job_id,
            "jobName": job.request["jobName"],
            "serviceJobType": job.request["serviceJobType"],
            "status": job.status,
            "createdAt": int(job.created * 1000),
            "startedAt": int(job.created * 1000),
        }
        if job.reason:
            summary["statusReason"] = job.reason
        if job.trained:
            resource = {"name": "TrainingJobArn", "value": job.trained[-1].arn}
            summary["latestAttempt"] = {"serviceResourceId": resource}
        return summary

    def _queue(self, name: str) -> dict[str, Any]:
        queue = self.queues.get(name.rpartition("/")[2])
        if queue is None:
            raise AwsError("ClientException", f"Job queue {name} does not exist")
        return queue

    def _job(self, request: Mapping[str, Any]) -> ServiceJob:
        job = self.jobs.get(request["jobId"])
        if job is None:
            raise AwsError("ClientException", f"Service job {request['jobId']} not found")
        return job

    def _advance(self) -> None:
        """Bring all jobs to the state that their training jobs and their queue's capacity give them, the oldest first."""
        for job in self.jobs.values():
            self._follow(job)
        for job in self.jobs.values():
            queue = job.request["jobQueue"].rpartition("/")[2]
            if job.status == "SUBMITTED":
                job.status = "RUNNABLE"
            busy = sum(
                other.status in ("SCHEDULED", "STARTING", "RUNNING")
                for other in self.jobs.values()
                if other.request["jobQueue"] == job.request["jobQueue"]
            )
            if job.status == "RUNNABLE" and busy < self.capacity[queue]:
                self._start(job)

    def _follow(self, job: ServiceJob) -> None:
        if job.status not in ("SCHEDULED", "STARTING", "RUNNING") or not job.trained:
            return
        training = job.trained[-1]
        if training.status not in FINAL:
            job.status = STATES.get(training.secondary, "RUNNING")
        elif training.failure.startswith("CapacityError") and not job.terminated:
            self._start(job)
        elif training.status == "Completed":
            job.status, job.reason = "SUCCEEDED", "Received status from SageMaker: Training job completed"
        elif len(job.trained) < int((job.request.get("retryStrategy") or {}).get("attempts", 1)) and not job.terminated:
            self._start(job)
        else:
            reason = training.failure or f"Training job {training.status}"
            job.status, job.reason = "FAILED", job.reason or f"Received status from SageMaker: {reason}"

    def _start(self, job: ServiceJob) -> None:
        try:
            request = json.loads(job.request["serviceRequestPayload"])
            name = f"AWSBatch{request['TrainingJobName'][:23]}{uuid.uuid4().hex}"
            job.trained.append(self._create({**request, "TrainingJobName": name}))
            job.status = "SCHEDULED"
        except (AwsError, KeyError, ValueError) as error:
            job.status, job.reason = "FAILED", f"Received status from SageMaker: {error}"
