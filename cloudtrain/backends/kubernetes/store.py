"""Read and write a Kubernetes job's files in object stores (gs://, s3://): large bundles, saved logs, results.

Uses this machine's credentials; google-auth and boto3 are imported on first use.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.gcs import Bucket
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.s3 import download_prefix

if TYPE_CHECKING:
    from cloudtrain.source.bundle import Bundle


class KubeStore:
    """Object stores, addressed by URI. Every call blocks; raises BackendError, MissingExtra."""

    def __init__(self) -> None:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        self._google = GoogleApi("", (lambda: emulator.rstrip("/")) if emulator else None)
        self._aws = Aws(
            "kubernetes", None, None, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        )

    def upload_bundle(self, bundle: Bundle, uri: str) -> None:
        """Upload a bundle unless the object exists."""
        scheme, bucket, name = _parse_uri(uri)
        if scheme == "gs":
            Bucket(self._google, bucket).upload_once(bundle.path, name)
            return
        try:
            self._aws.call("s3", "head_object", Bucket=bucket, Key=name)
        except AwsError as error:
            if error.code not in ("404", "NoSuchKey", "NotFound"):
                raise
            with open(bundle.path, "rb") as file:
                self._aws.call("s3", "upload_fileobj", Fileobj=file, Bucket=bucket, Key=name)

    def read_log(self, prefix: str) -> str:
        """Return a log from its parts below a prefix, joined in the order of their names; "" if there are none."""
        scheme, bucket, _ = _parse_uri(prefix)
        content = io.BytesIO()
        for name in self._list_names(prefix):
            if scheme == "gs":
                Bucket(self._google, bucket).download(name, content)
            else:
                content.write(self._aws.call("s3", "get_object", Bucket=bucket, Key=name)["Body"].read())
        return content.getvalue().decode("utf-8", "replace")

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders below a prefix, in order."""
        prefix_path = _parse_uri(prefix)[2]
        parts = (name[len(prefix_path) :].partition("/") for name in self._list_names(prefix))
        return sorted({folder for folder, slash, _ in parts if slash})

    def _list_names(self, prefix: str) -> list[str]:
        scheme, bucket, prefix_path = _parse_uri(prefix)
        if scheme == "gs":
            return sorted(Bucket(self._google, bucket).list_objects(prefix_path))
        pages = self._aws.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix_path)
        return sorted(str(item["Key"]) for page in pages for item in page.get("Contents", ()))

    def download(self, base: str, folders: tuple[str, ...], into: Path) -> None:
        """Download folders below a base URI; files that exist locally are skipped."""
        into.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            scheme, bucket, prefix = _parse_uri(f"{base}/{folder}/")
            if scheme == "gs":
                Bucket(self._google, bucket).download_prefix(prefix, into / folder)
            else:
                download_prefix(self._aws, f"s3://{bucket}/{prefix}", into / folder)


def _parse_uri(uri: str) -> tuple[str, str, str]:
    scheme, _, rest = uri.partition("://")
    bucket, _, name = rest.partition("/")
    return scheme, bucket, name
