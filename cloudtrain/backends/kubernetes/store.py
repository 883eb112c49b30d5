"""What lies in an object store for jobs on Kubernetes: large sources, logs that outlive their pods, results.

gs:// with google-auth, s3:// with boto3, each imported where it is needed; on this machine's own credentials.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.gcs import Bucket
from cloudtrain.backends.google import Api
from cloudtrain.backends.s3 import bring

if TYPE_CHECKING:
    from cloudtrain.source.bundle import Bundle


class KubeStore:
    """Objects by their URI. Every call blocks; raises BackendError, MissingExtra."""

    def __init__(self) -> None:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        self._google = Api("", (lambda: emulator.rstrip("/")) if emulator else None)
        self._aws = Aws(
            "kubernetes", None, None, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )

    def put(self, bundle: Bundle, uri: str) -> None:
        """Upload a bundle unless it is there."""
        scheme, bucket, name = _split(uri)
        if scheme == "gs":
            Bucket(self._google, bucket).put_once(bundle.path, name)
            return
        try:
            self._aws.ask("s3", "head_object", Bucket=bucket, Key=name)
        except AwsError as error:
            if error.code not in ("404", "NoSuchKey", "NotFound"):
                raise
            with open(bundle.path, "rb") as file:
                self._aws.ask("s3", "upload_fileobj", Fileobj=file, Bucket=bucket, Key=name)

    def text(self, prefix: str) -> str:
        """Return the pieces of a log below a prefix, in the order of their names; "" where there are none."""
        scheme, bucket, _ = _split(prefix)
        pieces = io.BytesIO()
        for name in self._names(prefix):
            if scheme == "gs":
                Bucket(self._google, bucket).read(name, pieces)
            else:
                pieces.write(self._aws.ask("s3", "get_object", Bucket=bucket, Key=name)["Body"].read())
        return pieces.getvalue().decode("utf-8", "replace")

    def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders below a prefix, in order."""
        below = _split(prefix)[2]
        rest = (name[len(below) :].partition("/") for name in self._names(prefix))
        return sorted({folder for folder, slash, _ in rest if slash})

    def _names(self, prefix: str) -> list[str]:
        scheme, bucket, below = _split(prefix)
        if scheme == "gs":
            return sorted(Bucket(self._google, bucket).sizes(below))
        listed = self._aws.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=below)
        return sorted(str(item["Key"]) for page in listed for item in page.get("Contents", ()))

    def bring(self, base: str, folders: tuple[str, ...], into: Path) -> None:
        """Copy folders below a base; what is here already is not read again."""
        into.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            scheme, bucket, prefix = _split(f"{base}/{folder}/")
            if scheme == "gs":
                Bucket(self._google, bucket).bring(prefix, into / folder)
            else:
                bring(self._aws, f"s3://{bucket}/{prefix}", into / folder)


def _split(uri: str) -> tuple[str, str, str]:
    scheme, _, rest = uri.partition("://")
    bucket, _, name = rest.partition("/")
    return scheme, bucket, name
