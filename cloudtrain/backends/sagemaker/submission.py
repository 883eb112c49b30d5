"""Upload what a training job reads, send it to SageMaker or a queue of AWS Batch, and find it where the answer was lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.aws import Aws, AwsError, AwsNoService, AwsUnreachable
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import client
from cloudtrain.backends.sagemaker.channels import CHANNEL, MANIFEST_CHANNEL
from cloudtrain.backends.sagemaker.hyperparameters import MANIFEST_FILE, manifest_object
from cloudtrain.backends.sagemaker.request import OBJECT
from cloudtrain.errors import BackendError, Unreachable

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.backends.sagemaker.listing import DescribedJobs
    from cloudtrain.backends.sagemaker.queue import Queue
    from cloudtrain.source.bundle import Bundle

NEW_ROLE_S, ROLE_PAUSE_S = 60.0, 5.0  # how long a role counts as new, and the pause between two tries


def upload(aws: Aws, plan: Plan, bundle: Bundle, home: Path, kms_key: str | None, pause_s: float) -> None:
    """Upload to the S3 URIs of a plan what is not there; blocking, one request for each object.

    `home` remembers which bundles were uploaded from this machine.
    """
    from cloudtrain.backends.store.s3 import S3

    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
    for channel in plan.request["InputDataConfig"]:
        if channel["ChannelName"] not in (CHANNEL, MANIFEST_CHANNEL):
            continue
        store = S3(aws, channel["DataSource"]["S3DataSource"]["S3Uri"], encryption, pause_s)
        if channel["ChannelName"] == MANIFEST_CHANNEL:
            store.write(MANIFEST_FILE, manifest_object(Manifest.from_dict(plan.manifest)).encode())
            continue
        marker = home / "sagemaker" / "uploaded" / store.bucket / bundle.sha256
        try:
            if marker.exists() and store.exists(OBJECT):  # by an earlier submit from this machine
                continue
            store.add(OBJECT, bundle.path)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        except OSError as error:
            raise BackendError(f"{error.filename} cannot be used: {error.strerror}", "free some disk space") from None


def submit_job(
    aws: Aws, jobs: DescribedJobs, attempt_id: str, request: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """Send a request to SageMaker; return the ARN of its job, also where the answer was lost.

    Raises AwsNoService where nothing was sent.
    """
    try:
        return _create(aws, request, options)
    except AwsNoService:
        raise
    except AwsError as error:
        if error.code == "ResourceInUse" or error.resent or isinstance(error, Unreachable):
            return _find_after_error(jobs, attempt_id, request, error)
        raise


def _create(aws: Aws, request: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Create the job; again for a minute after its role was created, which SageMaker cannot assume at once.

    IAM's changes take seconds to arrive: https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot.html (2026-11-28).
    """
    while True:
        try:
            if client.choose_client(request, options)[0] == "sdk":
                from cloudtrain.backends.sagemaker.huggingface_estimator import submit

                arn = submit(aws, request)
            else:
                arn = str(aws.call("sagemaker", "create_training_job", **request).get("TrainingJobArn") or "")
            if arn:
                return arn
            raise AwsUnreachable("SageMaker's answer does not name the job", "check proxies")
        except AwsError as error:
            if "assume" not in error.message or error.resent or not _role_is_new(aws, str(request["RoleArn"])):
                raise
            aws.clock.sleep(ROLE_PAUSE_S)


def _role_is_new(aws: Aws, role: str) -> bool:
    try:
        created = aws.call("iam", "get_role", RoleName=role.rpartition("/")[2])["Role"]["CreateDate"]
    except AwsError:
        return False
    return bool(aws.clock.now() - created.timestamp() < NEW_ROLE_S)


def _find_after_error(jobs: DescribedJobs, attempt_id: str, request: Mapping[str, Any], error: AwsError) -> str:
    """Return the ARN of the job that a lost or repeated request created; raises AwsError where there is none.

    An error is a refusal only if no earlier try of the same request has created the job.
    """
    try:
        job = jobs.describe(attempt_id)
    except BackendError as lookup_error:
        message = error.message
        if lookup_error.message != error.message:
            message += f", and SageMaker did not answer whether it has the job: {lookup_error.message}"
        raise AwsUnreachable(message, lookup_error.hint, error.code) from None
    if job is None and error.code == "ResourceInUse":
        raise AwsUnreachable(f"SageMaker has a job {attempt_id}, but does not describe it yet", "", error.code)
    if job is None:
        raise error
    if job.get("HyperParameters") != request["HyperParameters"]:
        message = f"there is a training job {attempt_id} already, with different contents"
        raise AwsError(message, "submit again: the new run gets another name") from None
    return str(job["TrainingJobArn"])


def submit_to_queue(queue: Queue, attempt_id: str, request: Mapping[str, Any]) -> str:
    """Send a request to the queue; return the ARN of the service job that holds it, also where its answer was lost."""
    try:
        return queue.submit(request)
    except AwsNoService:
        raise
    except AwsError as error:
        # A repeated request with the same client token is refused as ClientException.
        if not (error.code == "ClientException" or error.resent or isinstance(error, Unreachable)):
            raise
        try:
            job = queue.find(attempt_id)
        except BackendError as lookup_error:
            message = f"{error.message}, and AWS Batch did not answer whether it has the job: {lookup_error.message}"
            if error.code == "ClientException" and not error.resent:  # a refusal: no queue of this name, say
                raise error from None
            raise AwsUnreachable(message, lookup_error.hint, error.code) from None
        if job is None and (error.resent or "token" in error.message.lower()):
            message = f"the queue has a job {attempt_id}, but does not list it yet"
            raise AwsUnreachable(message, "", error.code) from None
        if job is None:
            raise
        if json.loads(job["serviceRequestPayload"])["HyperParameters"] != request["HyperParameters"]:
            message = f"the queue has a job {attempt_id} already, with different contents"
            raise AwsError(message, "submit again: the new run gets another name") from None
        return str(job["jobArn"])
