"""Convert DescribeTrainingJob's answer into a Status: state, exit code, reason, times, console URL, billed seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import ENDED, State, Status, short_reason
from cloudtrain.job.units import format_time

ARN = re.compile(
    r"arn:(?P<partition>aws[a-z-]*):sagemaker:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):training-job/(?P<name>[\w-]+)"
)
VERDICT = re.compile(r"(?<!\s)\s*\[cloudtrain (?P<state>[A-Z_]+) (?P<code>-?\d+|-) (?P<by>\w+)\]")  # launcher/result.py
_EXIT_CODE = re.compile(r"[Ee]xit [Cc]ode:? (\d+)")
_CAPACITY_ERROR = re.compile(
    r"\w*Capacity\w*(Error|Exception)?\b[:.]?"
)  # the error's name at the start of a FailureReason
_QUEUED = {"Pending"}
_RUNNING = {"Training", "Uploading"}
_CONSOLES = {
    "aws": "{region}.console.aws.amazon.com",
    "aws-cn": "console.amazonaws.cn",
    "aws-us-gov": "console.amazonaws-us-gov.com",
}
# github.com/aws/sagemaker-python-sdk/issues/57 and 1968, seen 2026-11-23
_PULL_ERROR = re.compile(r"^ClientError: Cannot pull|^ClientError: Cannot find the requested image", re.IGNORECASE)
_PULL_REASON = (
    "SageMaker cannot pull the image {}: it does not exist there, or the role lacks ecr:BatchGetImage and "
    "ecr:GetDownloadUrlForLayer, or the disk is too small for it (resources.disk_gb); {}"
)
# options.sagemaker.infra_check; AWS documents no wording (API_InfraCheckConfig, seen 2026-11-23)
_HEALTH_CHECK = re.compile(r"health[ -]?check", re.IGNORECASE)
_CAPACITY_REASON = "SageMaker had no such machines: {}; try again, another instance_type, region or use_spot"


def parse_status(job: Mapping[str, Any]) -> Status:
    """Return the Status of a job from DescribeTrainingJob's answer."""
    primary, secondary = str(job["TrainingJobStatus"]), str(job.get("SecondaryStatus") or "")
    failure_reason = str(job.get("FailureReason") or "").strip()
    code: int | None = None
    reason = event = ""
    if primary == "InProgress":
        state = State.RUNNING if secondary in _RUNNING else State.QUEUED if secondary in _QUEUED else State.STARTING
        reason = _progress(job, secondary, state)
    elif primary == "Stopping":
        state = State.STOPPING
    elif primary == "Completed":
        state, code, reason = State.SUCCEEDED, 0, _warm_pool(job)
    elif primary == "Stopped":
        state, reason = _stopped(job, secondary, failure_reason)
    elif primary == "Failed":
        state, code, reason = _failed(job, failure_reason)
        event = "capacity" if _is_capacity_error(failure_reason) else ""
        if state is State.LOST and job.get("TrainingEndTime"):
            event = ENDED
    else:
        state, reason = State.LOST, f"SageMaker calls the job {primary}"
    started, ended = _format_time(job.get("TrainingStartTime")), _end_time(job, state)
    billed = _billable_s(job) if state.final else None  # it grows until then
    return Status(state, code, reason, started, ended, console_url(job), billed, event)


def console_url(job: Mapping[str, Any]) -> str | None:
    """Return the address of a job in AWS's console."""
    arn = ARN.fullmatch(str(job.get("TrainingJobArn")))
    if not arn:
        return None
    region = arn["region"]
    host = _CONSOLES.get(arn["partition"], _CONSOLES["aws"]).format(region=region)
    return f"https://{host}/sagemaker/home?region={region}#/jobs/{job['TrainingJobName']}"


def seconds_since_end(job: Mapping[str, Any], clock: Clock = SYSTEM) -> float | None:
    """Return how long ago a job ended, None while it runs."""
    ended = job.get("TrainingEndTime")
    return (clock.utc() - ended).total_seconds() if isinstance(ended, datetime) else None


def seconds_since_start(job: Mapping[str, Any], clock: Clock = SYSTEM) -> float | None:
    """Return how long ago a job's training started, None before that."""
    started = job.get("TrainingStartTime")
    return (clock.utc() - started).total_seconds() if isinstance(started, datetime) else None


def instance_count(job: Mapping[str, Any]) -> int:
    """Return how many machines a job has."""
    resources = job.get("ResourceConfig") or {}
    groups = resources.get("InstanceGroups") or ()
    return int(sum(group["InstanceCount"] for group in groups) or resources.get("InstanceCount") or 1)


def _progress(job: Mapping[str, Any], secondary: str, state: State) -> str:
    """Return what SageMaker does with a job that has not ended, and while the job waits SageMaker's message."""
    if secondary == "Interrupted":
        return "SageMaker reclaimed the spot machine and looks for another"
    if secondary == "Restarting":
        return "SageMaker had an internal error and restarts the job"
    newest: Mapping[str, Any] = next(reversed(job.get("SecondaryStatusTransitions") or ()), {})
    message = str(newest.get("StatusMessage") or "") if newest.get("Status") == secondary else ""
    parts = ("SageMaker", secondary, message if state is not State.RUNNING else "")
    return short_reason(": ".join(part for part in parts if part)) if secondary else ""


def _stopped(job: Mapping[str, Any], secondary: str, failure_reason: str) -> tuple[State, str]:
    """Return state and reason of a job with the status Stopped: a time limit, a cancellation, or lost spot machines."""
    history = [str(change.get("Status")) for change in job.get("SecondaryStatusTransitions") or []]
    if secondary == "MaxRuntimeExceeded" or "MaxRuntimeExceeded" in history:
        return State.TIMED_OUT, "SageMaker ended the job: it reached MaxRuntimeInSeconds"
    if secondary == "MaxWaitTimeExceeded" or "MaxWaitTimeExceeded" in history:
        if "Interrupted" in history:
            return (
                State.PREEMPTED,
                "SageMaker reclaimed the spot machine and found no other before the job's deadline (MaxWaitTimeInSeconds)",
            )
        return State.TIMED_OUT, "SageMaker found no spot machine before the job's deadline (MaxWaitTimeInSeconds)"
    pending_s = (job.get("StoppingCondition") or {}).get("MaxPendingTimeInSeconds")
    if pending_s and "Stopping" not in history and "Pending" in history and "Training" not in history:
        return State.TIMED_OUT, f"SageMaker ended the job: it found no machines within max_pending ({pending_s} s)"
    # A requested stop passes through Stopping. Without one SageMaker goes from Interrupted straight to Stopped.
    if history and "Stopping" not in history and "Interrupted" in history[-2:]:
        return State.PREEMPTED, "SageMaker reclaimed the spot machine"
    return State.CANCELLED, failure_reason or "stopped on request"


def _warm_pool(job: Mapping[str, Any]) -> str:
    """Return what becomes of machines that were kept for the next job, "" where none were."""
    pool = job.get("WarmPoolStatus") or {}
    if pool.get("Status") == "Available":
        seconds = (job.get("ResourceConfig") or {}).get("KeepAlivePeriodInSeconds")
        return f"its machines stay warm for the next job for at most {seconds} s, and are billed"
    return f"its warm machines are used by {pool.get('ReusedByJob')}" if pool.get("Status") == "Reused" else ""


def _failed(job: Mapping[str, Any], failure_reason: str) -> tuple[State, int | None, str]:
    if verdict := VERDICT.search(failure_reason):
        code = None if verdict["code"] == "-" else int(verdict["code"])
        state = State[verdict["state"]] if verdict["state"] in State.__members__ else State.FAILED
        reason = failure_reason[: verdict.start()].removeprefix("AlgorithmError: ").strip()
        return state, code, reason
    if _is_capacity_error(failure_reason):
        return State.FAILED, None, _CAPACITY_REASON.format(failure_reason.partition(": ")[2].strip() or failure_reason)
    if _PULL_ERROR.search(failure_reason):
        image = (job.get("AlgorithmSpecification") or {}).get("TrainingImage") or ""
        return State.FAILED, None, _PULL_REASON.format(image, failure_reason)
    if _HEALTH_CHECK.search(failure_reason) and not failure_reason.startswith("AlgorithmError"):
        return State.LOST, None, f"SageMaker's health check found a machine unhealthy: {failure_reason}"
    if failure_reason.startswith("InternalServerError"):
        return State.LOST, None, failure_reason  # an error on SageMaker's side
    exit_code = _EXIT_CODE.search(failure_reason)
    return State.FAILED, int(exit_code[1]) if exit_code else None, failure_reason


def _is_capacity_error(failure_reason: str) -> bool:
    """Return whether a job failed for insufficient capacity: CapacityError, Insufficient(Instance)Capacity..."""
    return bool(_CAPACITY_ERROR.match(failure_reason)) and not VERDICT.search(failure_reason)


def _billable_s(job: Mapping[str, Any]) -> int | None:
    """Return the billed seconds of all machines; SageMaker reports those of one."""
    seconds = job.get("BillableTimeInSeconds")
    if seconds is None:
        return None
    return int(seconds) * instance_count(job)


def _end_time(job: Mapping[str, Any], state: State) -> str | None:
    return _format_time(job.get("TrainingEndTime") or job.get("LastModifiedTime")) if state.final else None


def _format_time(moment: Any) -> str | None:
    return format_time(moment) if isinstance(moment, datetime) else None
