"""Upload and download S3 objects: single files, whole prefixes, and tar archives that are unpacked safely."""

from __future__ import annotations

import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.aws import Aws, AwsError, AwsUnreachable
from cloudtrain.errors import BackendError

CHUNK = 1 << 20  # bytes in memory at a time
UPLOAD_TRIES = 5  # tries to upload an object that others upload at the same time


def download_archive(aws: Aws, uri: str, into: Path) -> None:
    """Download a tar.gz at s3://bucket/key and unpack it into a folder; a missing one is no error. Raises BackendError.

    The job's code wrote the archive, so it is not trusted: names and links that lead out of the folder, devices and
    owners are refused.
    """
    bucket, key = _split_uri(uri)
    with tempfile.TemporaryFile() as file:
        try:
            for piece in _read_chunks(aws, bucket, key):
                file.write(piece)
        except AwsError as error:
            if error.code in ("NoSuchKey", "404"):
                return
            raise
        file.seek(0)
        into.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                archive.extractall(into, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise BackendError(f"{uri} cannot be unpacked: {error}", "it is in the bucket as it is") from None


def upload_once(aws: Aws, path: Path, bucket: str, key: str, pause_s: float = 1.0, **encryption: Any) -> None:
    """Upload a file unless an object of that key exists; blocking. Raises AwsError, OSError."""
    for turn in range(UPLOAD_TRIES):
        with open(path, "rb") as file:
            try:
                aws.call("s3", "put_object", Body=file, IfNoneMatch="*", Bucket=bucket, Key=key, **encryption)
            except AwsError as error:
                if error.code in ("ConditionalRequestConflict", "409"):  # another submit uploads the same object
                    if turn == UPLOAD_TRIES - 1:
                        raise AwsUnreachable(error.message, "try again in some minutes", error.code) from None
                    time.sleep(pause_s)
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


def download_prefix(aws: Aws, uri: str, into: Path, stop: Callable[[], bool] = lambda: False) -> int:
    """Download all objects below s3://bucket/prefix/, or the one at s3://bucket/key, and return how many there are.

    A file with the object's size and time is not downloaded again. `stop` is called before every chunk. Raises
    BackendError, also for a name that would lead out of `into`.
    """
    bucket, prefix = _split_uri(uri)
    count = 0
    for stored in _list_objects(aws, bucket, prefix):
        name = str(stored["Key"])[len(prefix) :]
        if not prefix.endswith("/") and prefix:
            if name:
                continue  # another key with the same beginning
            name = prefix.rpartition("/")[2]
        if not name or name.endswith("/"):
            continue  # the placeholder object of a folder
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise BackendError(f"the bucket {bucket} offers a file {name!r}, which is refused")
        count += 1
        path, changed_ns = into / name, int(stored["LastModified"].timestamp()) * 1_000_000_000
        if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (stored["Size"], changed_ns):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with open(partial, "wb") as file:
            for piece in _read_chunks(aws, bucket, str(stored["Key"])):
                if stop():
                    return count
                file.write(piece)
        os.utime(partial, ns=(changed_ns, changed_ns))
        partial.replace(path)
    return count


def _read_chunks(aws: Aws, bucket: str, key: str) -> Iterator[bytes]:
    """Yield an object's bytes in chunks; raises AwsError, also where the connection breaks off."""
    from botocore.exceptions import BotoCoreError

    body = aws.call("s3", "get_object", Bucket=bucket, Key=key)["Body"]
    try:
        yield from body.iter_chunks(CHUNK)
    except BotoCoreError as error:
        raise aws.explain(error, "s3:GetObject") from None


def _list_objects(aws: Aws, bucket: str, prefix: str) -> Iterator[Mapping[str, Any]]:
    token: dict[str, str] = {}
    while True:
        page = aws.call("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
        yield from page.get("Contents", [])
        if not page.get("IsTruncated"):
            return
        token = {"ContinuationToken": page["NextContinuationToken"]}


def _split_uri(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
