"""The training jobs that SageMaker has described, and when: what is known for a moment is not asked for again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.sagemaker import listing, status
from cloudtrain.events import Status


class DescribedJobs:
    """Training jobs of one account and region."""

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
                if self._aws.clock.monotonic() - seen_at > listing.FORGET_S:
                    self._known.pop(name, None)
            elif (listed := found.get(names[name])) and job and status.parse_status(job).state is listed.state:
                self._known[name] = self._aws.clock.monotonic(), job
