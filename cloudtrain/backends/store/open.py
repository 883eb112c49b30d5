"""Open the files at a URI with the credentials and endpoints that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

from cloudtrain.backends.aws import Aws
from cloudtrain.backends.azure import Tokens
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.store.files import Files, Objects
from cloudtrain.backends.store.folder import Folder
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.backends.store.s3 import S3
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest

STORES = "s3://bucket/..., gs://bucket/... or az://container@account/..."


class Clients:
    """The clients of all stores; what one bucket has learnt, such as a token, the next one uses.

    Args:
        aws: reads s3://; without it the variables of the environment say which credentials and endpoint do.
    """

    def __init__(self, aws: Aws | None = None, clock: Clock = SYSTEM) -> None:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        self._aws = aws or Aws("", region, None, s3_endpoint(), clock)
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        self._google = GoogleApi("", (lambda: emulator) if emulator else None, clock)
        self._azure, self._clock = Tokens(clock), clock

    def bucket(self, uri: str) -> Objects:
        """Return the objects of a bucket, or below a prefix in it; nothing is asked yet. Raises BadRequest."""
        scheme, _, rest = uri.partition("://")
        if scheme == "s3" and rest.partition("/")[0]:
            return S3(self._aws, uri)
        if scheme == "gs" and rest.partition("/")[0]:
            return Gcs(self._google, uri)
        if scheme == "az" and rest.partition("/")[0]:
            from cloudtrain.backends.store.blob import Blob

            return Blob(uri, self._azure, self._clock)
        raise BadRequest(f"{uri} is not a folder, {STORES}")


def opened(uri: str, aws: Aws | None = None, *, may_be_link: bool = True) -> Files:
    """Return the files of a path, file://, s3://, gs:// or az://; nothing is asked yet. Raises BadRequest.

    Args:
        aws: reads s3://, see `Clients`.
        may_be_link: whether the folder itself may be a link; False where others can make it one.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme == "file":
        return Folder(Path(rest if mark else uri).expanduser().absolute(), may_be_link)
    if not rest.rstrip("/").partition("/")[2]:
        raise BadRequest(f"{uri} is not a folder, {STORES}")
    return Clients(aws).bucket(uri)


def s3_endpoint() -> str | None:
    """Return the address of another S3 server than Amazon's, None without one."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
