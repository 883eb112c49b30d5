"""Check a CreateTrainingJob request against SageMaker's limits before anything is uploaded.

Each problem names its field in the job file. The limits come from botocore 1.44.5's service model; a test compares them.
Neither botocore nor the SDK checks maxima and patterns. Limits from AWS's documentation only are marked "documents".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Plan, TimeLimit
from cloudtrain.errors import Problem
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

MAX_RUNTIME_S = 28 * 86400  # documents
STOP_S = 120  # between SIGTERM and SIGKILL
# For results, after MaxRuntimeInSeconds; 118 s were seen (github.com/aws/sagemaker-python-sdk/issues/4451)
UPLOAD_S = 600
MAX_DISK_GB = 16384  # documents
MAX_HYPERPARAMETERS, MAX_NAME, MAX_VALUE = 100, 256, 2500
MAX_TAGS, MAX_TAG_KEY, MAX_TAG_VALUE = 50, 128, 256
MAX_CHANNELS, MAX_CHANNEL_NAME, MAX_URI = 20, 64, 1024
MAX_METRICS, MAX_METRIC_NAME, MAX_REGEX = 40, 255, 500
MAX_IMAGE, MAX_ARGUMENT, MAX_KEY = 255, 256, 2048
MAX_SUBNETS, MAX_GROUPS, MAX_RETRIES = 16, 5, 30
ROLE = r"arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+"
NAME = r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
KEY = r"[a-zA-Z0-9:/_-]*"
NETWORK = r"[-0-9a-zA-Z]{0,32}"
URI = r"(https|s3)://([^/]+)/?(.*)"
BUCKET = r"(?!\d+\.\d+\.\d+\.\d+/)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"  # documents


def time_limit(plan: Plan) -> TimeLimit:
    """Return the longest time of an attempt; SageMaker's own retries share it (docs of RetryStrategy, seen 2026-11-23)."""
    stopping = plan.request["StoppingCondition"]
    longest_s = max(stopping["MaxRuntimeInSeconds"], stopping.get("MaxWaitTimeInSeconds", 0))
    note = f"time for uploading results beyond {UPLOAD_S // 60} minutes is not included"
    if stopping.get("MaxWaitTimeInSeconds", 0) > stopping["MaxRuntimeInSeconds"]:
        wait = "the wait for spot machines is counted, which is not billed: SageMaker limits wait and run only together"
        note = f"{wait}; {note}"
    wait_s = longest_s - stopping["MaxRuntimeInSeconds"]
    return TimeLimit(longest_s + STOP_S + UPLOAD_S, note, _describe_parts(plan, longest_s), wait_s=wait_s)


def _describe_parts(plan: Plan, longest_s: int) -> str:
    """Return what is added to limits.max_runtime for the longest time, and who shares it."""
    run_s, most_s = float(plan.manifest["max_runtime_s"]), plan.request["StoppingCondition"]["MaxRuntimeInSeconds"]
    parts = [
        (run_s, "of limits.max_runtime"),
        (most_s - run_s, "that cloudtrain adds for downloads and the last checkpoint"),
        (longest_s - most_s, "of waiting for spot machines"),
        (STOP_S, "to stop"),
        (UPLOAD_S, "to upload results"),
    ]
    summed = " + ".join(f"{units.format_duration(seconds)} {why}" for seconds, why in parts if seconds > 0)
    total = units.format_duration(longest_s + STOP_S + UPLOAD_S)
    attempts = int(plan.job["retry"]["max_attempts"])
    shared = f"; SageMaker's own retries share it: the {attempts} attempts cost as one" if attempts > 1 else ""
    return f"the {total} of an attempt are {summed}{shared if plan.retries == 'platform' else ''}"


def find_problems(request: Mapping[str, Any], job: Job) -> list[Problem]:
    """Return everything in a request that SageMaker would refuse, each with its field in the job file."""
    return [
        *_check_text(request["TrainingJobName"], "name", 63, NAME),
        *_check_account(request),
        *_check_tags(request["Tags"]),
        *_check_channels(request["InputDataConfig"]),
        *_check_metrics(request["AlgorithmSpecification"]["MetricDefinitions"]),
        *_check_container(request, job),
        *_check_times(request["StoppingCondition"], job),
    ]


def _check_text(value: str, path: str, longest: int, pattern: str = "") -> Iterator[Problem]:
    if len(value) > longest:
        yield Problem(f"has {len(value):,} characters, SageMaker accepts at most {longest:,}", path)
    elif pattern and value and not re.fullmatch(pattern, value, re.DOTALL):
        yield Problem(f"is not valid for SageMaker: {value[:80]!r}", path, f"it must match {pattern}")


def _check_account(request: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _check_text(request["RoleArn"], "options.sagemaker.role", 2048, ROLE)
    bucket = request["InputDataConfig"][-1]["DataSource"]["S3DataSource"]["S3Uri"].split("/")[2]
    if bucket and not re.fullmatch(BUCKET, bucket):
        yield Problem(f"is not a valid bucket name: {bucket!r}", "options.sagemaker.bucket")
    yield from _check_text(request["OutputDataConfig"].get("KmsKeyId", ""), "options.sagemaker.kms_key", MAX_KEY, KEY)
    key = request["ResourceConfig"].get("VolumeKmsKeyId", "")
    yield from _check_text(key, "options.sagemaker.volume_kms_key", MAX_KEY, KEY)
    network = request.get("VpcConfig") or {}
    for name, path, most in (("Subnets", "subnets", MAX_SUBNETS), ("SecurityGroupIds", "security_groups", MAX_GROUPS)):
        values = network.get(name, [])
        if len(values) > most:
            yield Problem(f"are {len(values)}, SageMaker accepts at most {most}", f"options.sagemaker.{path}")
        for value in values:
            yield from _check_text(value, f"options.sagemaker.{path}", 32, NETWORK)


def _check_tags(tags: list[Mapping[str, str]]) -> Iterator[Problem]:
    if len(tags) > MAX_TAGS:
        yield Problem(
            f"are {len(tags)} with the ones that cloudtrain adds, SageMaker accepts at most {MAX_TAGS}", "labels"
        )
    for tag in tags:
        path = f"labels.{tag['Key'][:40]}"
        if not tag["Key"]:
            yield Problem("one label has an empty name", "labels")
        if tag["Key"].lower().startswith("aws:"):
            yield Problem("begins with aws:, which is AWS's own", path)
        yield from _check_text(tag["Key"], path, MAX_TAG_KEY)
        yield from _check_text(tag["Value"], path, MAX_TAG_VALUE)
        odd = sorted({letter for letter in tag["Key"] + tag["Value"] if not _is_allowed_in_tag(letter)})
        if odd:
            message = f"contains characters that an AWS tag cannot have: {' '.join(map(repr, odd[:5]))}"
            yield Problem(message, path, "letters, digits, spaces and _.:/=+-@")


def _is_allowed_in_tag(letter: str) -> bool:
    return letter in "_.:/=+-@" or unicodedata.category(letter)[0] in "LZN"


def _check_channels(channels: list[Mapping[str, Any]]) -> Iterator[Problem]:
    if len(channels) > MAX_CHANNELS:
        yield Problem(
            f"are {len(channels) - 1}, SageMaker accepts at most {MAX_CHANNELS - 1} besides the source's channel",
            "inputs",
        )
    for channel in channels[:-1]:
        path = f"inputs.{channel['ChannelName']}"
        yield from _check_text(channel["ChannelName"], path, MAX_CHANNEL_NAME)
        if source := channel["DataSource"].get("S3DataSource"):
            yield from _check_text(source["S3Uri"], f"{path}.uri", MAX_URI, URI)


def _check_metrics(metrics: list[Mapping[str, str]]) -> Iterator[Problem]:
    if len(metrics) > MAX_METRICS:
        yield Problem(
            f"are {len(metrics)} with the ones that cloudtrain adds, SageMaker accepts at most {MAX_METRICS}", "metrics"
        )
    for metric in metrics:
        yield from _check_text(metric["Name"], f"metrics.{metric['Name'][:40]}", MAX_METRIC_NAME, ".+")
        yield from _check_text(metric["Regex"], f"metrics.{metric['Name'][:40]}", MAX_REGEX)


def _check_container(request: Mapping[str, Any], job: Job) -> Iterator[Problem]:
    yield from _check_text(
        request["AlgorithmSpecification"]["TrainingImage"],
        "image" if job.image else "options.sagemaker.image",
        MAX_IMAGE,
        r"\S*",
    )
    for argument in request["AlgorithmSpecification"].get("ContainerEntrypoint", ()):
        yield from _check_text(argument, "options.sagemaker.python", MAX_ARGUMENT, ".*")
    output_is_s3 = (job.output or "").startswith("s3://")  # `request.py` refuses any other output
    output = request["OutputDataConfig"]["S3OutputPath"]
    yield from _check_text(output, "output", MAX_URI - len("/checkpoints"), URI if output_is_s3 else "")
    disk_gb = request["ResourceConfig"]["VolumeSizeInGB"]
    if disk_gb > MAX_DISK_GB:
        yield Problem(f"is {disk_gb:,}, SageMaker accepts at most {MAX_DISK_GB:,}", "resources.disk_gb")
    retries = (request.get("RetryStrategy") or {}).get("MaximumRetryAttempts", 1)
    if retries > MAX_RETRIES:
        yield Problem(f"is {retries + 1}, SageMaker accepts at most {MAX_RETRIES + 1}", "retry.max_attempts")


def _check_times(stopping: Mapping[str, int], job: Job) -> Iterator[Problem]:
    longest_s = stopping["MaxRuntimeInSeconds"]
    if longest_s > MAX_RUNTIME_S:
        yield Problem(f"is {job.limits.max_runtime}, SageMaker runs a job for 28 days at most", "limits.max_runtime")
    wait_s = stopping.get("MaxWaitTimeInSeconds")
    if wait_s is not None and wait_s > MAX_RUNTIME_S:
        yield Problem("is longer than 28 days", "options.sagemaker.max_wait")
    elif wait_s is not None and wait_s < longest_s <= MAX_RUNTIME_S:
        message = (
            f"is shorter than the job's own time limit: {longest_s} s (limits.max_runtime plus the time "
            "that cloudtrain adds)"
        )
        yield Problem(
            message,
            "options.sagemaker.max_wait",
            "it bounds running and waiting together; to bound only the waiting, set limits.max_wait instead",
        )
