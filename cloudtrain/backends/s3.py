"""Results in S3, brought here: archives unpacked without trusting them, prefixes copied, what is here not read again."""

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

PIECE = 1 << 20  # bytes in memory at a time
PUTS = 5  # of an object that others are putting at the same time


def unpack(aws: Aws, uri: str, into: Path) -> None:
    """Unpack an archive at s3://bucket/key below a folder; one that is not there is no error. Raises BackendError.

    Names and links that lead out of the folder, devices and owners are refused: the job's code wrote the archive.
    """
    bucket, key = _split(uri)
    with tempfile.TemporaryFile() as file:
        try:
            for piece in _pieces(aws, bucket, key):
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


def put_once(aws: Aws, path: Path, bucket: str, key: str, pause_s: float = 1.0, **more: Any) -> None:
    """Put a file where nothing is yet; what is there by that name is as good. Blocking. Raises AwsError, OSError."""
    for turn in range(PUTS):
        with open(path, "rb") as file:
            try:
                aws.ask("s3", "put_object", Body=file, IfNoneMatch="*", Bucket=bucket, Key=key, **more)
            except AwsError as error:
                if error.code in ("ConditionalRequestConflict", "409"):  # another submit is putting this very object
                    if turn == PUTS - 1:
                        raise AwsUnreachable(error.message, "try again in some minutes", error.code) from None
                    time.sleep(pause_s)
                    continue
                if error.code not in ("PreconditionFailed", "412"):
                    raise
        return


def there(aws: Aws, bucket: str, key: str) -> bool:
    """Tell whether an object exists; 403 is what S3 says of a missing one to who may not list the bucket."""
    try:
        aws.ask("s3", "head_object", Bucket=bucket, Key=key)
    except AwsError as error:
        if error.code not in ("404", "NoSuchKey", "NotFound", "403"):
            raise
        return False
    return True


def pack(aws: Aws, folder: Path, uri: str) -> None:
    """Put a folder's archive at s3://bucket/key; blocking. Raises BackendError."""
    bucket, key = _split(uri)
    try:
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
                archive.add(folder, arcname=".")
            file.seek(0)
            aws.ask("s3", "upload_fileobj", Fileobj=file, Bucket=bucket, Key=key)  # in parts where it is large
    except OSError as error:
        raise BackendError(f"{folder} cannot be packed: {error.strerror}", "free some disk space") from None


def bring(aws: Aws, uri: str, into: Path, stop: Callable[[], bool] = lambda: False) -> int:
    """Copy all objects below s3://bucket/prefix/, or the one at s3://bucket/key, and return how many there are.

    Of an object that is here with its size and time nothing is read. `stop` is asked before every piece. Raises
    BackendError, also for a name that would lead out of `into`.
    """
    bucket, prefix = _split(uri)
    count = 0
    for item in _listed(aws, bucket, prefix):
        name = str(item["Key"])[len(prefix) :]
        if not prefix.endswith("/") and prefix:
            if name:
                continue  # what only begins like it
            name = prefix.rpartition("/")[2]
        if not name or name.endswith("/"):
            continue  # what consoles make of a folder
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise BackendError(f"the bucket {bucket} offers a file {name!r}, which is refused")
        count += 1
        place, changed_ns = into / name, int(item["LastModified"].timestamp()) * 1_000_000_000
        if place.is_file() and (place.stat().st_size, place.stat().st_mtime_ns) == (item["Size"], changed_ns):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_name(f".{place.name}.{os.getpid()}")
        with open(half, "wb") as file:
            for piece in _pieces(aws, bucket, str(item["Key"])):
                if stop():
                    return count
                file.write(piece)
        os.utime(half, ns=(changed_ns, changed_ns))
        half.replace(place)
    return count


def _pieces(aws: Aws, bucket: str, key: str) -> Iterator[bytes]:
    """Yield an object's bytes; raises AwsError, also where the connection breaks on the way."""
    from botocore.exceptions import BotoCoreError

    body = aws.ask("s3", "get_object", Bucket=bucket, Key=key)["Body"]
    try:
        yield from body.iter_chunks(PIECE)
    except BotoCoreError as error:
        raise aws.explained(error, "s3:GetObject") from None


def _listed(aws: Aws, bucket: str, prefix: str) -> Iterator[Mapping[str, Any]]:
    token: dict[str, str] = {}
    while True:
        page = aws.ask("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
        yield from page.get("Contents", [])
        if not page.get("IsTruncated"):
            return
        token = {"ContinuationToken": page["NextContinuationToken"]}


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
