"""Read the statuses of many training jobs: ListTrainingJobs, and DescribeTrainingJob for what has changed in it.

A summary in the list has no reason, no exit code and no start time, so each change of a job is one DescribeTrainingJob.

AWS limits ListTrainingJobs to 2 requests a second for an account, which cannot be raised (Service Quotas, as reported in
https://github.com/aws-solutions/deepracer-on-aws/issues/87, 2026-08-10); for DescribeTrainingJob no rate is published
(https://docs.aws.amazon.com/general/latest/gr/sagemaker.html, 2026-11-23). The filters of the list do not help: StatusEquals
is applied to each page of jobs in any status (ListTrainingJobs in botocore 1.44.5), and LastModifiedTimeAfter returns empty
pages one after the other (https://github.com/aws/aws-sdk/issues/486, 2023-01-18).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cloudtrain.backends.aws import DENIED, Aws, AwsError
from cloudtrain.backends.manifest import sent_record
from cloudtrain.backends.plan import ATTEMPT_ID, FoundAttempt
from cloudtrain.backends.sagemaker.hyperparameters import PIECE
from cloudtrain.backends.sagemaker.queue import Queue
from cloudtrain.backends.sagemaker.status import parse_status
from cloudtrain.events import State, Status
from cloudtrain.job.units import format_time

CALLS_PER_S = 1.0  # half of what ListTrainingJobs allows
PAGE = 100  # jobs; the API's maximum (MaxResults in botocore 1.44.5)
PAGES = 10  # in one call, or twice as many as the jobs asked for fill: older jobs are left out
DESCRIBES = 100  # in one call; what else has changed is left out
# The message of a job that waits may change while its status and secondary status stay.
RECHECK_S, RECHECKS = 30.0, 5  # how old it gets, and how many are read again in one call
FORGET_S = 600.0  # how long a job is remembered that nobody asks for: a call may ask for some of those that are watched
DENIED_S = 600.0  # without permission to list jobs, how long they are not listed
_WAITING = (State.QUEUED, State.STARTING)


@dataclass(frozen=True)
class _Seen:
    """What is known of a job: the summary that was described, its status, and when that was read (monotonic)."""

    summary: tuple[Any, ...]
    created: datetime
    status: Status
    read_at: float


class JobList:
    """The jobs of one account and region. It remembers jobs between calls.

    Args:
        describe: returns a job by its name.
        wait: called between two pages, whose rate AWS limits.
    """

    def __init__(
        self, aws: Aws, describe: Callable[[str], Mapping[str, Any] | None], wait: Callable[[], None] = lambda: None
    ) -> None:
        self._aws, self._describe, self._wait = aws, describe, wait
        self._seen: dict[str, _Seen] = {}
        self._asked: dict[str, float] = {}  # ARN -> when it was asked for last (monotonic)
        self._denied_at: float | None = None  # monotonic
        self._absent: set[str] = set()  # ARNs that the list did not show: it is not searched to its end for them again

    def statuses(self, arns: Collection[str]) -> dict[str, Status]:
        """Return ARN -> status of the jobs that the list shows, {} where listing is denied; blocking. Raises BackendError."""
        if self._denied_at is not None and self._aws.clock.monotonic() - self._denied_at < DENIED_S:
            return {}
        moment = self._aws.clock.monotonic()
        self._asked |= dict.fromkeys(arns, moment)
        self._asked = {arn: at for arn, at in self._asked.items() if moment - at < FORGET_S}
        self._seen = {arn: seen for arn, seen in self._seen.items() if arn in self._asked}
        try:
            jobs = self._find(arns)
        except AwsError as error:
            if error.code not in DENIED:
                raise
            self._denied_at = self._aws.clock.monotonic()
            return {}
        self._absent = set(arns) - jobs.keys()
        again = self._outdated(arns)
        found: dict[str, Status] = {}
        described = 0
        for arn, job in jobs.items():
            seen, summary = self._seen.get(arn), _summary(job)
            if seen is None or seen.summary != summary or arn in again:
                if described == DESCRIBES:
                    continue
                described += 1
                seen = self._read(arn, job, summary)
            if seen is not None:
                found[arn] = seen.status
        return found

    def _find(self, arns: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Return the summaries of jobs, from as few pages as show them all."""
        wanted = set(arns) - self._absent
        found: dict[str, Mapping[str, Any]] = {}
        created = (
            [seen.created for arn, seen in self._seen.items() if arn in arns] if wanted <= self._seen.keys() else []
        )
        for page in self.pages(created, max(PAGES, 2 * len(wanted) // PAGE)):
            found |= {job["TrainingJobArn"]: job for job in page if job["TrainingJobArn"] in arns}
            if wanted <= found.keys():
                break
        return found

    def pages(self, created: Collection[datetime] = (), most: int = PAGES) -> Iterator[list[Mapping[str, Any]]]:
        """Yield pages of the list, the newest jobs first, back to the oldest of these times."""
        query: dict[str, Any] = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": PAGE}
        if created:
            query["CreationTimeAfter"] = min(created) - timedelta(seconds=1)
        for number in range(most):
            if number:
                self._wait()
            answer = self._aws.call("sagemaker", "list_training_jobs", **query)
            yield answer["TrainingJobSummaries"]
            if not answer.get("NextToken"):
                return
            query["NextToken"] = answer["NextToken"]

    def _outdated(self, arns: Collection[str]) -> set[str]:
        """Return the jobs whose message is read again although their summary stays."""
        limit = self._aws.clock.monotonic() - RECHECK_S
        waiting = [
            (seen.read_at, arn) for arn, seen in self._seen.items() if arn in arns and seen.status.state in _WAITING
        ]
        return {arn for read_at, arn in sorted(waiting)[:RECHECKS] if read_at < limit}

    def _read(self, arn: str, listed: Mapping[str, Any], summary: tuple[Any, ...]) -> _Seen | None:
        """Return a job's status, None if it is gone; remember it unless it is older than the list, or half written."""
        job = self._describe(str(listed["TrainingJobName"]))
        self._seen.pop(arn, None)
        if job is None or job["TrainingJobArn"] != arn:
            return None
        seen = _Seen(summary, listed["CreationTime"], parse_status(job), self._aws.clock.monotonic())
        complete = seen.status.state is not State.RUNNING or seen.status.started_at is not None
        if complete and _summary(job)[:2] == summary[:2]:
            self._seen[arn] = seen
        return seen


def _summary(job: Mapping[str, Any]) -> tuple[Any, ...]:
    return job["TrainingJobStatus"], job.get("SecondaryStatus"), job.get("LastModifiedTime")


def labelled(aws: Aws, jobs: JobList, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
    """Yield our jobs with a tag, among the account's newest; blocking. Raises BackendError.

    Search would find them in one call, but needs a permission that shows all jobs of the account.
    """
    for summary in (summary for page in jobs.pages() for summary in page):
        job_name, arn = str(summary["TrainingJobName"]), str(summary["TrainingJobArn"])
        if ATTEMPT_ID.fullmatch(job_name) and job_name not in known and read_labels(aws, arn).get(name) == value:
            sent = aws.call("sagemaker", "describe_training_job", TrainingJobName=job_name)["HyperParameters"]
            record = sent_record({key: text.strip('"') for key, text in sent.items()}, PIECE)
            yield FoundAttempt(job_name, arn, record, format_time(summary["CreationTime"].timestamp()))


def labelled_in_queue(queue: Queue, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
    """Yield our service jobs with a tag; blocking. Raises BackendError."""
    for summary in queue.all():
        job_name = str(summary["jobName"])
        if not ATTEMPT_ID.fullmatch(job_name) or job_name in known:
            continue
        job = queue.describe(str(summary["jobArn"]))
        if job and (job.get("tags") or {}).get(name) == value:
            sent = json.loads(job["serviceRequestPayload"])["HyperParameters"]
            record = sent_record({key: text.strip('"') for key, text in sent.items()}, PIECE)
            yield FoundAttempt(job_name, str(job["jobArn"]), record, format_time(int(job["createdAt"]) / 1000))


def read_labels(aws: Aws, handle: str) -> dict[str, str]:
    """Return a job's tags without those that cloudtrain adds to every job."""
    labels: dict[str, str] = {}
    token: dict[str, str] = {}
    while True:
        page = aws.call("sagemaker", "list_tags", ResourceArn=handle, **token)
        labels |= {tag["Key"]: tag["Value"] for tag in page["Tags"] if not tag["Key"].startswith("cloudtrain:")}
        if not page.get("NextToken"):
            return labels
        token = {"NextToken": page["NextToken"]}


class DescribedJobs:
    """The jobs of one account and region that were described, and when: what is known for a moment is not asked for again."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        # Job's name -> when it was last seen, and DescribeTrainingJob's answer without what is large.
        self._known: dict[str, tuple[float, Mapping[str, Any] | None]] = {}

    def describe(self, name: str) -> Mapping[str, Any] | None:
        """Return DescribeTrainingJob's answer, None where there is no job of that name; blocking."""
        try:
            job = dict(self._aws.call("sagemaker", "describe_training_job", TrainingJobName=name))
            small = {key: value for key, value in job.items() if key not in ("HyperParameters", "Environment")}
            self._known[name] = self._aws.clock.monotonic(), small
            return job
        except AwsError as error:
            # "Requested resource not found" comes as ValidationException, the code of every malformed request too.
            if error.code == "ResourceNotFound" or (error.code == "ValidationException" and "not found" in str(error)):
                return None
            raise

    def recent(self, handle: str, age_s: float) -> Mapping[str, Any] | None:
        """Return a job as it was seen at most `age_s` seconds ago, None where it was not."""
        seen_at, job = self._known.get(handle.rpartition("/")[2], (-math.inf, None))
        if job is None or job["TrainingJobArn"] != handle or self._aws.clock.monotonic() - seen_at >= age_s:
            return None
        return job

    def keep_listed(self, handles: Sequence[str], found: Mapping[str, Status]) -> None:
        """Note that the list has shown some of the jobs in `handles` just now, and forget the others after a while."""
        names = {handle.rpartition("/")[2]: handle for handle in handles}
        for name, (seen_at, job) in list(self._known.items()):
            if name not in names:
                if self._aws.clock.monotonic() - seen_at > FORGET_S:
                    self._known.pop(name, None)
            elif (listed := found.get(names[name])) and job and parse_status(job).state is listed.state:
                self._known[name] = self._aws.clock.monotonic(), job
