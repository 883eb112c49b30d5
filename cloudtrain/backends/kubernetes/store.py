"""Read and write a Kubernetes job's files in object stores (gs://, s3://): large bundles, saved logs, results.

Uses this machine's credentials; google-auth and boto3 are imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends import s3
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.download import StoredObject, download_all
from cloudtrain.backends.gcs import Bucket
from cloudtrain.backends.google import GoogleApi

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
        s3.upload_once(self._aws, bundle.path, bucket, name)

    def read_log(self, prefix: str) -> str:
        """Return a log from its parts below a prefix, joined in the order of their names; "" if there are none."""
        parts = sorted(self._list_objects(prefix), key=lambda part: part.name)
        content = b"".join(chunk for part in parts if part.size for chunk in part.read(0, part.size - 1))
        return content.decode("utf-8", "replace")

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders below a prefix, in order."""
        parts = (stored.name.partition("/") for stored in self._list_objects(prefix))
        return sorted({folder for folder, slash, _ in parts if slash})

    def _list_objects(self, prefix: str) -> Iterator[StoredObject]:
        scheme, bucket, path = _parse_uri(prefix)
        return Bucket(self._google, bucket).list_objects(path) if scheme == "gs" else s3.list_objects(self._aws, prefix)

    def download(self, base: str, folders: tuple[str, ...], into: Path) -> None:
        """Download folders below a base URI; files that exist locally are skipped."""
        into.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            download_all(self._list_objects(f"{base}/{folder}/"), into / folder)


def _parse_uri(uri: str) -> tuple[str, str, str]:
    scheme, _, rest = uri.partition("://")
    bucket, _, name = rest.partition("/")
    return scheme, bucket, name
