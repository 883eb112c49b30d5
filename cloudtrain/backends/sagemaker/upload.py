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
