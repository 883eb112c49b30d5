"""Simulates ListTrainingJobs: filters, order and pages of the jobs' summaries.

Limits are those of ListTrainingJobs in botocore 1.44.5, which also says how StatusEquals filters.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

MOST, DEFAULT = 100, 10  # jobs in a page
ORDERS = {"Name": "TrainingJobName", "CreationTime": "CreationTime", "Status": "TrainingJobStatus"}


class AwsError(Exception):
    """A refusal, with AWS's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def list_training_jobs(jobs: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return one page of the jobs' summaries; raises AwsError.

    As in the service, StatusEquals filters the jobs of a page after the page was cut: a page may be empty and have a
    NextToken.
    """
    size = int(request.get("MaxResults") or DEFAULT)
    if not 1 <= size <= MOST:
        message = f"1 validation error detected: Value '{size}' at 'maxResults' failed to satisfy constraint"
        raise AwsError("ValidationException", message)
    order = ORDERS[request.get("SortBy") or "CreationTime"]
    found = sorted(
        (job for job in jobs if _matches(job, request)), key=lambda job: (job[order], job["TrainingJobName"])
    )
    if request.get("SortOrder") != "Ascending":
        found.reverse()
    first = _offset(request.get("NextToken"))
    status = request.get("StatusEquals")
    page = [job for job in found[first : first + size] if status in (None, job["TrainingJobStatus"])]
    answer: dict[str, Any] = {"TrainingJobSummaries": page}
    if first + size < len(found):
        answer["NextToken"] = base64.b64encode(str(first + size).encode()).decode()
    return answer


def _matches(job: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    times = all(
        (f"{name}After" not in request or job[name] > request[f"{name}After"])
        and (f"{name}Before" not in request or job[name] < request[f"{name}Before"])
        for name in ("CreationTime", "LastModifiedTime")
    )
    return times and (request.get("NameContains") or "") in job["TrainingJobName"]


def _offset(token: str | None) -> int:
    try:
        return int(base64.b64decode(token)) if token else 0
    except ValueError:
        raise AwsError("ValidationException", "The token is not valid.") from None
