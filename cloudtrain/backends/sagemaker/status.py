"""What SageMaker says of a training job, as a Status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cloudtrain.events import State, Status

ARN = re.compile(
    r"arn:(?P<partition>aws[a-z-]*):sagemaker:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):training-job/(?P<name>[\w-]+)"
)
VERDICT = re.compile(
    r"\s*\[cloudtrain (?P<state>[A-Z_]+) (?P<code>-?\d+|-) (?P<by>\w+)\]"
)  # launcher/sagemaker_failure.py
_CODE = re.compile(r"[Ee]xit [Cc]ode:? (\d+)")
_SHORT = re.compile(r"\w*Capacity\w*(Error|Exception)?\b[:.]?")  # the word before the colon of a FailureReason
_QUEUED = {"Pending"}
_RUNNING = {"Training", "Uploading"}
_CONSOLES = {
    "aws": "{region}.console.aws.amazon.com",
    "aws-cn": "console.amazonaws.cn",
    "aws-us-gov": "console.amazonaws-us-gov.com",
}
_CAPACITY = "SageMaker had no such machines: {}; try again, another instance_type, region or use_spot"


def status_of(found: Mapping[str, Any]) -> Status:
    """Return the state of a job as DescribeTrainingJob told it."""
    primary, secondary = str(found["TrainingJobStatus"]), str(found.get("SecondaryStatus") or "")
    said = str(found.get("FailureReason") or "").strip()
    code: int | None = None
    reason = event = ""
    if primary == "InProgress":
        state = State.RUNNING if secondary in _RUNNING else State.QUEUED if secondary in _QUEUED else State.STARTING
        if secondary == "Interrupted":
            reason = "the spot machine was taken away; SageMaker looks for another"
    elif primary == "Stopping":
        state = State.STOPPING
    elif primary == "Completed":
        state, code = State.SUCCEEDED, 0
    elif primary == "Stopped":
        state, reason = _stopped(found, secondary, said)
    elif primary == "Failed":
        state, code, reason = _failed(said)
        event = "capacity" if _without_machines(said) else ""
    else:
        state, reason = State.LOST, f"SageMaker calls the job {primary}"
    began, ended = _time(found.get("TrainingStartTime")), _ended(found, state)
    return Status(state, code, reason, began, ended, url(found), _billable_s(found), event)


def url(found: Mapping[str, Any]) -> str | None:
    """Return the address of a job in AWS's console."""
    arn = ARN.fullmatch(str(found.get("TrainingJobArn")))
    if not arn:
        return None
    region = arn["region"]
    host = _CONSOLES.get(arn["partition"], _CONSOLES["aws"]).format(region=region)
    return f"https://{host}/sagemaker/home?region={region}#/jobs/{found['TrainingJobName']}"


def seconds_since_end(found: Mapping[str, Any]) -> float | None:
    """Return how long ago a job ended, None while it runs."""
    ended = found.get("TrainingEndTime")
    return (datetime.now(UTC) - ended).total_seconds() if isinstance(ended, datetime) else None


def seconds_since_start(found: Mapping[str, Any]) -> float | None:
    """Return how long ago a job had its machines, None before that."""
    began = found.get("TrainingStartTime")
    return (datetime.now(UTC) - began).total_seconds() if isinstance(began, datetime) else None


def _stopped(found: Mapping[str, Any], secondary: str, said: str) -> tuple[State, str]:
    """Stopped has many meanings: a limit, somebody's wish, or spot machines that never came back."""
    seen = [str(change.get("Status")) for change in found.get("SecondaryStatusTransitions") or []]
    if secondary == "MaxRuntimeExceeded" or "MaxRuntimeExceeded" in seen:
        return State.TIMED_OUT, "SageMaker ended it: MaxRuntimeInSeconds was over"
    if secondary == "MaxWaitTimeExceeded" or "MaxWaitTimeExceeded" in seen:
        if "Interrupted" in seen:
            return State.PREEMPTED, "the spot machine was taken away, and max_wait was over before another came"
        return State.TIMED_OUT, "no spot machine came before max_wait was over"
    # Stopping stands there only when somebody asked; SageMaker goes from Interrupted to Stopped when it gives up itself.
    if seen and "Stopping" not in seen and "Interrupted" in seen[-2:]:
        return State.PREEMPTED, "the spot machine was taken away"
    return State.CANCELLED, said or "stopped on request"


def _failed(said: str) -> tuple[State, int | None, str]:
    if verdict := VERDICT.search(said):
        code = None if verdict["code"] == "-" else int(verdict["code"])
        state = State[verdict["state"]] if verdict["state"] in State.__members__ else State.FAILED
        reason = said[: verdict.start()].removeprefix("AlgorithmError: ").strip()
        return state, code, reason
    if _without_machines(said):
        return State.FAILED, None, _CAPACITY.format(said.partition(": ")[2].strip() or said)
    if said.startswith("InternalServerError"):
        return State.LOST, None, said  # the platform's own fault
    found = _CODE.search(said)
    return State.FAILED, int(found[1]) if found else None, said


def _without_machines(said: str) -> bool:
    """Return whether a job failed because there were no machines: CapacityError, Insufficient(Instance)Capacity..."""
    return bool(_SHORT.match(said)) and not VERDICT.search(said)


def _billable_s(found: Mapping[str, Any]) -> int | None:
    """Return what is billed: SageMaker counts the seconds of one machine, and bills each."""
    seconds = found.get("BillableTimeInSeconds")
    if seconds is None:
        return None
    return int(seconds) * int((found.get("ResourceConfig") or {}).get("InstanceCount") or 1)


def _ended(found: Mapping[str, Any], state: State) -> str | None:
    return _time(found.get("TrainingEndTime") or found.get("LastModifiedTime")) if state.final else None


def _time(moment: Any) -> str | None:
    if not isinstance(moment, datetime):
        return None
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
