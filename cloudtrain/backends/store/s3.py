"""Objects of an S3 bucket, through boto3 or any client of an S3-compatible store."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import http
from cloudtrain.backends.aws import Aws, AwsError, AwsUnreachable
from cloudtrain.backends.store.files import PIECE, Objects, bounded

if TYPE_CHECKING:
    from cloudtrain.backends.store.download import StoredObject

CHUNK = 1 << 20  # bytes in memory at a time
ONE_REQUEST = 64 << 20  # bytes; up to here an upload is a single request, S3 takes 5 GB in one
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html (2026-11-23)
CHECKSUMS = {"ChecksumSHA256": "sha256", "ChecksumSHA1": "sha1", "ChecksumCRC32": "crc32"}
UPLOAD_TRIES = 5  # tries to upload an object that others upload at the same time
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-presigned-url.html (2026-11-25)
MOST_DAYS = 7  # of a presigned URL
_ABSENT = ("NoSuchKey", "404", "NotFound")
_EXISTS = ("PreconditionFailed", "412")
_CONFLICT = ("ConditionalRequestConflict", "409")  # others upload the same object


class S3(Objects):
    """Objects at s3://bucket/prefix. Every call blocks; raises AwsError, MissingExtra.

    Args:
        encryption: what put_object needs beside the object for its encryption.
        pause_s: seconds between two tries to add what others add.
    """

    def __init__(self, aws: Aws, uri: str, encryption: Mapping[str, str] | None = None, pause_s: float = 1.0) -> None:
        super().__init__(uri)
        self._aws, self._encryption, self._pause_s = aws, encryption or {}, pause_s

    def check_credentials(self) -> None:
        self._aws.check_credentials()

    def folders(self) -> Iterator[str]:
        prefix = self._prefix("")
        for page in self._pages(prefix, Delimiter="/"):
            yield from (str(item["Prefix"])[len(prefix) : -1] for item in page.get("CommonPrefixes", []))

    def read(self, name: str, most: int) -> bytes | None:
        try:
            body = self._call("get_object", name)["Body"]
        except AwsError as error:
            if error.code in _ABSENT:
                return None
            raise
        chunks = body.iter_chunks(PIECE)
        data: bytes = self._aws.explained(lambda: bounded(chunks, most, f"{self.uri}/{name}"), "s3:GetObject")
        return data

    def add(self, name: str, data: bytes | Path) -> bool:
        """A large file is uploaded in parts, in parallel, and has no limit of 5 GB. There is no condition for it, so two
        uploads at the same time both write: give them the same content.
        """
        if isinstance(data, Path) and data.stat().st_size > ONE_REQUEST:
            is_new = not self.exists(name)
            if is_new:
                self.write(name, data)
            return is_new
        for turn in range(UPLOAD_TRIES):
            with io.BytesIO(data) if isinstance(data, bytes) else open(data, "rb") as file:
                try:
                    self._call("put_object", name, Body=file, IfNoneMatch="*", **self._encryption)
                    return True
                except AwsError as error:
                    if error.code in _EXISTS:
                        return False
                    if error.code not in _CONFLICT:
                        raise
                    if turn == UPLOAD_TRIES - 1:
                        raise AwsUnreachable(error.message, "try again in some minutes", error.code) from None
            self._aws.clock.sleep(self._pause_s)
        raise AssertionError("the last try returns or raises")

    def write(self, name: str, data: bytes | Path) -> None:
        """Write bytes or a file, in parts where it is large; an object of that name is replaced."""
        if isinstance(data, Path):
            data.open("rb").close()  # raises OSError, which AWS's calls do not
            self._call("upload_file", name, Filename=str(data), ExtraArgs=self._encryption)
        else:
            self._call("put_object", name, Body=data, **self._encryption)

    def exists(self, name: str) -> bool:
        """Return whether an object exists. Without the permission to list, S3 answers 403 for a missing object."""
        try:
            self._call("head_object", name)
        except AwsError as error:
            if error.code not in (*_ABSENT, "403"):
                raise
            return False
        return True

    def delete(self, name: str) -> None:
        self._call("delete_object", name)

    def url(self, name: str, method: str, seconds: int) -> str:
        """Return a URL with which anybody reads (GET) or writes (PUT) one object for some seconds.

        It is signed with version 4, which all regions and S3-compatible stores take; boto3 alone would sign with version 2,
        which covers the Content-Type of a PUT.
        """
        operation = {"GET": "get_object", "PUT": "put_object"}[method]
        params, expires = {"Bucket": self.bucket, "Key": self.key(name)}, min(seconds, MOST_DAYS * 86400)

        def sign() -> Any:
            return _signer(self._aws).generate_presigned_url(operation, Params=params, ExpiresIn=expires)

        return str(self._aws.explained(sign, f"s3:{'GetObject' if method == 'GET' else 'PutObject'}"))

    def look_up(self, name: str) -> StoredObject | None:
        try:
            head = self._call("head_object", name)
        except AwsError as error:
            if error.code in _ABSENT:
                return None
            raise
        key = self.key(name)
        return self._stored(key, key.rpartition("/")[2], head, int(head["ContentLength"]))

    def _list(self, prefix: str) -> Iterator[StoredObject]:
        for page in self._pages(prefix):
            for item in page.get("Contents", []):
                yield self._stored(str(item["Key"]), str(item["Key"]), item, int(item["Size"]))

    def _pages(self, prefix: str, **more: str) -> Iterator[Mapping[str, Any]]:
        while True:
            page = self._aws.call("s3", "list_objects_v2", Bucket=self.bucket, Prefix=prefix, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = str(page["NextContinuationToken"])

    def _call(self, operation: str, name: str, **values: Any) -> Any:
        return self._aws.call("s3", operation, Bucket=self.bucket, Key=self.key(name), **values)

    def _stored(self, key: str, name: str, about: Mapping[str, Any], size: int) -> StoredObject:
        from cloudtrain.backends.store.download import StoredObject  # a submit does not need it

        etag = str(about["ETag"])
        whole = S3(self._aws, f"s3://{self.bucket}/{key}")
        return StoredObject(
            name=name,
            uri=whole.uri,
            size=size,
            version=etag,
            modified_ns=int(about["LastModified"].timestamp()) * 1_000_000_000,
            read=partial(whole._read_version, etag),
            verify=partial(whole._verify, etag),
            refresh=partial(whole.look_up, ""),
        )

    def _read_version(self, etag: str, first: int, last: int) -> Iterator[bytes]:
        """Yield bytes of one version of an object; continues where the connection breaks off, which botocore does not."""
        from botocore.exceptions import BotoCoreError

        from cloudtrain.backends.store.download import ChangedError

        def begin(received: int) -> Iterator[bytes]:
            body = self._call("get_object", "", IfMatch=etag, Range=f"bytes={first + received}-{last}")["Body"]
            try:
                yield from body.iter_chunks(CHUNK)
            except (BotoCoreError, OSError) as error:
                raise ConnectionError(self._aws.explain(error, "s3:GetObject")) from None

        try:
            yield from http.resume(begin, lambda error: isinstance(error, ConnectionError), self._aws.clock)
        except ConnectionError as error:
            raise error.args[0] from None
        except AwsError as error:
            if error.code in (*_EXISTS, *_ABSENT):
                raise ChangedError from None
            raise

    def _verify(self, etag: str, path: Path) -> bool | None:
        """Return whether a file has the object's checksum, None if S3 knows none that can be computed here.

        An ETag is the MD5, or that of its parts' MD5s with their number, unless KMS or the caller's key encrypts the object:
        https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html (2026-11-23).
        """
        from cloudtrain.backends.store.download import digest

        md5, _, count = etag.strip('"').partition("-")
        if not count and digest(path, "md5").hex() == md5:
            return True
        head = self._call("head_object", "", ChecksumMode="ENABLED")
        if head["ETag"] != etag:
            return False  # it has changed since
        if not count or head.get("ChecksumType") == "FULL_OBJECT":  # else it is one of the parts' checksums
            for field, algorithm in CHECKSUMS.items():
                if field in head:
                    return bool(head[field] == b64encode(digest(path, algorithm)).decode())
        if "SSECustomerAlgorithm" in head or head.get("ServerSideEncryption", "AES256") != "AES256":
            return None
        if not count:
            return False

        def part_size(number: int) -> int:
            return int(self._call("head_object", "", PartNumber=number)["ContentLength"])

        first = part_size(1)
        sizes = [first] * (int(count) - 1) + [path.stat().st_size - first * (int(count) - 1)]
        if digest(path, "md5", sizes).hex() == md5:
            return True
        sizes = [part_size(number) for number in range(1, int(count) + 1)]  # they need not have one size
        return digest(path, "md5", sizes).hex() == md5


@lru_cache(maxsize=8)
def _signer(aws: Aws) -> Any:
    """Return the client that signs; to make one takes longer than to sign."""
    from botocore.config import Config

    style = "path" if aws.endpoint else "virtual"  # with the region in the host's name: elsewhere S3 redirects
    config = Config(signature_version="s3v4", s3={"addressing_style": style})
    return aws.session.client("s3", region_name=aws.region, endpoint_url=aws.endpoint, config=config)
