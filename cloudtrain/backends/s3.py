"""Upload and download S3 objects: single files, whole prefixes, and tar archives that are unpacked safely."""

from __future__ import annotations

import gzip
import tarfile
import tempfile
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cloudtrain.backends import download, http
from cloudtrain.backends.aws import Aws, AwsError, AwsUnreachable
from cloudtrain.backends.download import ChangedError, StoredObject, digest
from cloudtrain.errors import BackendError
from cloudtrain.source.folder_writer import folder_writer
from cloudtrain.source.node_code import module

CHUNK = 1 << 20  # bytes in memory at a time
ONE_REQUEST = 64 << 20  # bytes; up to here an upload is a single request, S3 takes 5 GB in one
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadObject.html (2026-11-23)
CHECKSUMS = {"ChecksumSHA256": "sha256", "ChecksumSHA1": "sha1", "ChecksumCRC32": "crc32"}
UPLOAD_TRIES = 5  # tries to upload an object that others upload at the same time


def download_archive(aws: Aws, uri: str, into: Path) -> None:
    """Download a tar.gz at s3://bucket/key and unpack it into a folder, or else the folder of its name; none is no error.

    The job's code wrote the archive, so it is not trusted: names that lead out of the folder and devices are refused.
    Raises BackendError, DiskError.
    """
    bucket, key = _split_uri(uri)
    stored = _look_up(aws, bucket, key, f".{into.name}.tar.gz")
    if stored is None:  # SageMaker leaves it out with CompressionType NONE
        download_prefix(aws, f"{uri.removesuffix('.tar.gz')}/", into)
        return
    path = into.parent / stored.name
    download.download_all([stored], into.parent)
    code = module("launcher.folder_writer")
    with folder_writer(into) as writer:
        try:
            with tarfile.open(path, mode="r:gz") as archive:
                code.unpack(archive, writer)
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, code.Unsafe) as error:
            path.unlink()
            raise BackendError(
                f"{uri} cannot be unpacked: {error}",
                "repeat the command; when it fails again, the archive in the bucket is damaged (aws s3 cp copies it)",
            ) from None
    path.unlink()


def upload_once(aws: Aws, path: Path, bucket: str, key: str, pause_s: float = 1.0, **encryption: Any) -> None:
    """Upload a file unless an object of that key exists; blocking. Raises AwsError, OSError.

    A large file is uploaded in parts, in parallel, and has no limit of 5 GB. There is no condition for it, so two uploads
    at the same time both write: give them the same content.
    """
    if path.stat().st_size > ONE_REQUEST:
        if not exists(aws, bucket, key):
            aws.call("s3", "upload_file", Filename=str(path), Bucket=bucket, Key=key, ExtraArgs=encryption)
        return
    for turn in range(UPLOAD_TRIES):
        with open(path, "rb") as file:
            try:
                aws.call("s3", "put_object", Body=file, IfNoneMatch="*", Bucket=bucket, Key=key, **encryption)
            except AwsError as error:
                if error.code in ("ConditionalRequestConflict", "409"):  # another submit uploads the same object
                    if turn == UPLOAD_TRIES - 1:
                        raise AwsUnreachable(error.message, "try again in some minutes", error.code) from None
                    aws.clock.sleep(pause_s)
                    continue
                if error.code not in ("PreconditionFailed", "412"):
                    raise
        return


def exists(aws: Aws, bucket: str, key: str) -> bool:
    """Return whether an object exists. Without the permission to list, S3 answers 403 for a missing object."""
    try:
        aws.call("s3", "head_object", Bucket=bucket, Key=key)
    except AwsError as error:
        if error.code not in ("404", "NoSuchKey", "NotFound", "403"):
            raise
        return False
    return True


def upload_archive(aws: Aws, folder: Path, uri: str) -> None:
    """Upload a folder as a tar.gz to s3://bucket/key; blocking. Raises BackendError."""
    bucket, key = _split_uri(uri)
    try:
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
                archive.add(folder, arcname=".")
            file.seek(0)
            aws.call("s3", "upload_fileobj", Fileobj=file, Bucket=bucket, Key=key)  # a multipart upload if it is large
    except OSError as error:
        raise BackendError(f"{folder} cannot be packed: {error.strerror}", "free some disk space") from None


def download_prefix(
    aws: Aws, uri: str, into: Path, stop: Callable[[], bool] = lambda: False, named: Callable[[str], str] = str
) -> int:
    """Download all objects below s3://bucket/prefix/, or the one at s3://bucket/key, and return how many there are.

    A file with the object's size and time is not downloaded again. `stop` is called before every chunk. `named` gives
    other names to the files, "" to those that are left out; of two with one name the last is taken. Raises BackendError,
    also for a name that would lead out of `into`, and DiskError.
    """
    objects = {stored.name: stored for stored in list_objects(aws, uri, named)}
    return download.download_all(objects.values(), into, stop)


def list_folders(aws: Aws, uri: str) -> Iterator[str]:
    """Yield the names directly below s3://bucket/prefix/ that have objects below them, a thousand a call."""
    bucket, prefix = _split_uri(uri)
    token: dict[str, str] = {}
    while True:
        page = aws.call("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **token)
        yield from (str(item["Prefix"])[len(prefix) : -1] for item in page.get("CommonPrefixes", []))
        if not page.get("IsTruncated"):
            return
        token = {"ContinuationToken": str(page["NextContinuationToken"])}


def list_objects(aws: Aws, uri: str, named: Callable[[str], str] = str) -> Iterator[StoredObject]:
    """Yield the objects below s3://bucket/prefix/, or the one at s3://bucket/key, named relative to the prefix."""
    bucket, prefix = _split_uri(uri)
    token: dict[str, str] = {}
    while True:
        page = aws.call("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
        for item in page.get("Contents", []):
            key = str(item["Key"])
            name = key[len(prefix) :]
            if not prefix.endswith("/") and prefix:
                name = "" if name else prefix.rpartition("/")[2]  # other keys have the same beginning
            if name and not name.endswith("/") and (name := named(name)):  # consoles make empty objects for folders
                yield _stored(aws, bucket, key, name, item, int(item["Size"]))
        if not page.get("IsTruncated"):
            return
        token = {"ContinuationToken": page["NextContinuationToken"]}


def _look_up(aws: Aws, bucket: str, key: str, name: str) -> StoredObject | None:
    try:
        head = aws.call("s3", "head_object", Bucket=bucket, Key=key)
    except AwsError as error:
        if error.code in ("NoSuchKey", "404"):
            return None
        raise
    return _stored(aws, bucket, key, name, head, int(head["ContentLength"]))


def _stored(aws: Aws, bucket: str, key: str, name: str, about: Mapping[str, Any], size: int) -> StoredObject:
    etag = str(about["ETag"])
    return StoredObject(
        name=name,
        uri=f"s3://{bucket}/{key}",
        size=size,
        version=etag,
        modified_ns=int(about["LastModified"].timestamp()) * 1_000_000_000,
        read=partial(_read, aws, bucket, key, etag),
        verify=partial(_verify, aws, bucket, key, etag),
        refresh=partial(_look_up, aws, bucket, key, name),
    )


def _read(aws: Aws, bucket: str, key: str, etag: str, first: int, last: int) -> Iterator[bytes]:
    """Yield bytes of one version of an object; continues where the connection breaks off, which botocore does not."""
    from botocore.exceptions import BotoCoreError

    def begin(received: int) -> Iterator[bytes]:
        span = f"bytes={first + received}-{last}"
        body = aws.call("s3", "get_object", Bucket=bucket, Key=key, IfMatch=etag, Range=span)["Body"]
        try:
            yield from body.iter_chunks(CHUNK)
        except (BotoCoreError, OSError) as error:
            raise ConnectionError(aws.explain(error, "s3:GetObject")) from None

    try:
        yield from http.resume(begin, lambda error: isinstance(error, ConnectionError), aws.clock)
    except ConnectionError as error:
        raise error.args[0] from None
    except AwsError as error:
        if error.code in ("PreconditionFailed", "412", "NoSuchKey", "404"):
            raise ChangedError from None
        raise


def _verify(aws: Aws, bucket: str, key: str, etag: str, path: Path) -> bool | None:
    """Return whether a file has the object's checksum, None if S3 knows none that can be computed here.

    An ETag is the MD5, or that of its parts' MD5s with their number, unless KMS or the caller's key encrypts the object:
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html (2026-11-23).
    """
    md5, _, count = etag.strip('"').partition("-")
    if not count and digest(path, "md5").hex() == md5:
        return True
    about: dict[str, Any] = {"Bucket": bucket, "Key": key}
    head = aws.call("s3", "head_object", ChecksumMode="ENABLED", **about)
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
    part = int(aws.call("s3", "head_object", PartNumber=1, **about)["ContentLength"])
    sizes = [part] * (int(count) - 1) + [path.stat().st_size - part * (int(count) - 1)]
    if digest(path, "md5", sizes).hex() == md5:
        return True
    sizes = [
        int(aws.call("s3", "head_object", PartNumber=number, **about)["ContentLength"])
        for number in range(1, int(count) + 1)
    ]  # they need not have one size
    return digest(path, "md5", sizes).hex() == md5


def _split_uri(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
