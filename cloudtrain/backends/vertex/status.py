"""Convert the state of a Vertex AI custom job, as the API describes it, into ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.backends.google import explain_error, is_capacity_error
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import ENDED, EXIT_RESUMABLE, State, Status
from cloudtrain.job.units import format_time, unix_time

STATES = {
    "JOB_STATE_UNSPECIFIED": State.QUEUED,
    "JOB_STATE_QUEUED": State.QUEUED,
    "JOB_STATE_PENDING": State.STARTING,
    "JOB_STATE_RUNNING": State.RUNNING,
    "JOB_STATE_UPDATING": State.RUNNING,
    "JOB_STATE_CANCELLING": State.STOPPING,
    "JOB_STATE_SUCCEEDED": State.SUCCEEDED,
    "JOB_STATE_FAILED": State.FAILED,
    "JOB_STATE_CANCELLED": State.CANCELLED,
    "JOB_STATE_EXPIRED": State.TIMED_OUT,
    "JOB_STATE_PARTIALLY_SUCCEEDED": State.FAILED,
    "JOB_STATE_PAUSED": State.FAILED,  # a custom job is never resumed
}
_EXIT_STATUS = re.compile(r"non-zero status of (\d+)")


def has_ended(job: Mapping[str, Any]) -> bool:
    """Return whether a job as the API describes it has ended."""
    return STATES.get(job["state"], State.RUNNING).final


def job_status(
    handle: str,
    job: Mapping[str, Any],
    project: str,
    settle_s: float,
    result_event: Callable[[], Mapping[str, Any] | None],
    clock: Clock = SYSTEM,
) -> Status:
    """Return the status of a job as the API describes it.

    Args:
        settle_s: for so long after a failure the job is STOPPING while its result event has not arrived.
        result_event: returns the launcher's `result` event from the log, None where there is none.
    """
    state = STATES.get(job["state"], State.RUNNING)
    started, ended = _utc_time(job.get("startTime")), _utc_time(job.get("endTime"))
    url = console_url(handle, project)
    platform_error = str((job.get("error") or {}).get("message", ""))
    if not state.final:
        waits = state in (State.QUEUED, State.STARTING)
        parts = ("Vertex AI", str(job["state"]).removeprefix("JOB_STATE_"), platform_error)
        return Status(state, None, ": ".join(filter(None, parts)) if waits else "", started, url=url)
    if state is State.SUCCEEDED:
        return Status(state, 0, "", started, ended, url)
    if state is State.CANCELLED:
        return Status(state, EXIT_RESUMABLE, "cancelled", started, ended, url)
    if state is State.TIMED_OUT:
        return Status(state, None, f"expired before it ran: {platform_error}".rstrip(": "), started, ended, url)
    if job["state"] != "JOB_STATE_FAILED":
        return Status(
            state, None, f"{job['state'].removeprefix('JOB_STATE_').lower()}: {platform_error}", started, ended, url
        )
    event = result_event() if started else None
    if event is None and started and clock.now() - unix_time(str(job["endTime"])) < settle_s:
        return Status(State.STOPPING, started_at=started, url=url)
    if event is not None and event.get("state") != "SUCCEEDED":
        final_state = State[str(event["state"])]
        code = None if final_state is State.LOST else int(event["code"])
        lost = ENDED if final_state is State.LOST else ""
        return Status(final_state, code, str(event.get("reason", "")), started, ended, url, event=lost)
    exit_status = _EXIT_STATUS.search(platform_error)
    reason = explain_error(0, platform_error, "Vertex AI")[0] if platform_error else "Vertex AI gives no reason"
    code = int(exit_status[1]) if exit_status else None
    kind = "capacity" if started is None and is_capacity_error(0, platform_error) else ""
    return Status(state, code, reason, started, ended, url, event=kind)


def console_url(handle: str, project: str) -> str:
    """Return the URL of the job's page in Google's console."""
    _, _, _, region, _, number = handle.split("/")
    return f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}?project={project}"


def _utc_time(text: str | None) -> str | None:
    return format_time(unix_time(text)) if text else None
