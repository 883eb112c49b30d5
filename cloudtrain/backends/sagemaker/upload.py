"""Upload what a training job reads from S3: the source bundle, and a manifest that is too long for hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker.channels import CHANNEL, MANIFEST_CHANNEL
from cloudtrain.backends.sagemaker.hyperparameters import MANIFEST_FILE, manifest_object
from cloudtrain.backends.sagemaker.request import OBJECT
from cloudtrain.errors import BackendError

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.backends.aws import Aws
    from cloudtrain.source.bundle import Bundle


def upload(aws: Aws, plan: Plan, bundle: Bundle, home: Path, kms_key: str | None, pause_s: float) -> None:
    """Upload to the S3 URIs of a plan what is not there; blocking, one request for each object.

    `home` remembers which bundles were uploaded from this machine.
    """
    from cloudtrain.backends import s3

    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
    for channel in plan.request["InputDataConfig"]:
        if channel["ChannelName"] not in (CHANNEL, MANIFEST_CHANNEL):
            continue
        bucket, _, folder = channel["DataSource"]["S3DataSource"]["S3Uri"].removeprefix("s3://").partition("/")
        if channel["ChannelName"] == MANIFEST_CHANNEL:
            content = manifest_object(Manifest.from_dict(plan.manifest)).encode()
            aws.call("s3", "put_object", Bucket=bucket, Key=folder + MANIFEST_FILE, Body=content, **encryption)
            continue
        marker = home / "sagemaker" / "uploaded" / bucket / bundle.sha256
        try:
            if marker.exists() and s3.exists(aws, bucket, folder + OBJECT):  # by an earlier submit from this machine
                continue
            s3.upload_once(aws, bundle.path, bucket, folder + OBJECT, pause_s, **encryption)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        except OSError as error:
            raise BackendError(f"{error.filename} cannot be used: {error.strerror}", "free some disk space") from None
