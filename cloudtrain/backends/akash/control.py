"""Keep what is known of an attempt in the store, one small object a fact, each written once, for every process to read.

<store>/akash/<attempt id>/intent-<n>   hash and manifest of a deployment, before it is asked for
                           lease        the accepted bid: the attempt exists from here on
                           cancel       somebody asked for its end
                           ending       when its end, or the end of its lease, was first seen
                           end          its final status
                           began-<node>, end-<node>, given   written and read by the containers (container.py)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cloudtrain.backends import s3
from cloudtrain.backends.aws import Aws, AwsError

MOST_DAYS = 7  # of a presigned URL
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html (2026-11-25)
_EXISTS = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
_ABSENT = ("NoSuchKey", "404", "NotFound")


class Control:
    """The objects of one attempt. Every call blocks; raises BackendError."""

    def __init__(self, aws: Aws, store: str, attempt_id: str) -> None:
        self._aws = aws
        self._bucket, _, prefix = store.removeprefix("s3://").rstrip("/").partition("/")
        self._prefix = f"{prefix}/akash/{attempt_id}" if prefix else f"akash/{attempt_id}"
        self._known: dict[str, Any] = {}  # objects that never change

    def read(self, name: str) -> Any:
        """Return an object's JSON, None where there is none."""
        if name not in self._known:
            try:
                answer = self._aws.call("s3", "get_object", Bucket=self._bucket, Key=f"{self._prefix}/{name}")
            except AwsError as error:
                if error.code in _ABSENT:
                    return None
                raise
            try:
                self._known[name] = json.loads(answer["Body"].read())
            except ValueError:
                return None
        return self._known[name]

    def create(self, name: str, data: Any) -> bool:
        """Write an object unless it exists; return whether this call wrote it."""
        body = json.dumps(data).encode()
        try:
            self._aws.call(
                "s3", "put_object", Bucket=self._bucket, Key=f"{self._prefix}/{name}", Body=body, IfNoneMatch="*"
            )
        except AwsError as error:
            if error.code not in _EXISTS:
                raise
            return False
        return True

    def names(self) -> list[str]:
        """Return the names of the objects."""
        return [stored.name for stored in s3.list_objects(self._aws, f"s3://{self._bucket}/{self._prefix}/")]

    def delete(self, name: str) -> None:
        self._aws.call("s3", "delete_object", Bucket=self._bucket, Key=f"{self._prefix}/{name}")

    def url(self, name: str, method: str, seconds: int) -> str:
        """Return a presigned URL of an object."""
        return presigned(self._aws, self._bucket, f"{self._prefix}/{name}", method, seconds)

    def intents(self) -> list[Mapping[str, Any]]:
        """The deployments that were asked for, or were to be."""
        names = sorted(name for name in self.names() if name.startswith("intent-"))
        return [intent for name in names if (intent := self.read(name))]


def presigned(aws: Aws, bucket: str, key: str, method: str, seconds: int) -> str:
    """Return a URL with which anybody reads (GET) or writes (PUT) one object for some seconds.

    It is signed with version 4, which all regions and S3-compatible stores take; boto3 alone would sign with version 2, which
    covers the Content-Type of a PUT.
    """
    operation = {"GET": "get_object", "PUT": "put_object"}[method]

    def sign() -> Any:
        params = {"Bucket": bucket, "Key": key}
        return _signer(aws).generate_presigned_url(operation, Params=params, ExpiresIn=min(seconds, MOST_DAYS * 86400))

    return str(aws.explained(sign, f"s3:{'GetObject' if method == 'GET' else 'PutObject'}"))


@lru_cache(maxsize=8)
def _signer(aws: Aws) -> Any:
    """Return the client that signs; to make one takes longer than to sign."""
    from botocore.config import Config

    style = "path" if aws.endpoint else "virtual"  # with the region in the host's name: elsewhere S3 redirects
    config = Config(signature_version="s3v4", s3={"addressing_style": style})
    return aws.session.client("s3", region_name=aws.region, endpoint_url=aws.endpoint, config=config)
