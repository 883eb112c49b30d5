"""Results in S3, brought here: archives unpacked without trusting them, prefixes copied, what is here not read again."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.aws import Aws, AwsError
from cloudtrain.errors import BackendError

PIECE = 1 << 20  # bytes in memory at a time


def unpack(aws: Aws, uri: str, into: Path) -> None:
    """Unpack an archive at s3://bucket/key below a folder; one that is not there is no error. Raises BackendError.

    Names and links that lead out of the folder, devices and owners are refused: the job's code wrote the archive.
    """
    bucket, key = _split(uri)
    try:
        answer = aws.ask("s3", "get_object", Bucket=bucket, Key=key)
    except AwsError as error:
        if error.code in ("NoSuchKey", "404"):
            return
        raise
    with tempfile.TemporaryFile() as file:
        for piece in answer["Body"].iter_chunks(PIECE):
            file.write(piece)
        file.seek(0)
        into.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                archive.extractall(into, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise BackendError(f"{uri} cannot be unpacked: {error}", "it is in the bucket as it is") from None


def bring(aws: Aws, uri: str, into: Path) -> None:
    """Copy all objects below s3://bucket/prefix/; of an object that is here with its size and time nothing is read.

    Raises BackendError, also for a name that would lead out of `into`.
    """
    bucket, prefix = _split(uri)
    for item in _listed(aws, bucket, prefix):
        name = str(item["Key"])[len(prefix) :]
        if not name or name.endswith("/"):
            continue  # what consoles make of a folder
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise BackendError(f"the bucket {bucket} offers a file {name!r}, which is refused")
        place, changed_ns = into / name, int(item["LastModified"].timestamp()) * 1_000_000_000
        if place.is_file() and (place.stat().st_size, place.stat().st_mtime_ns) == (item["Size"], changed_ns):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        half = place.with_name(f".{place.name}.{os.getpid()}")
        with open(half, "wb") as file:
            for piece in aws.ask("s3", "get_object", Bucket=bucket, Key=item["Key"])["Body"].iter_chunks(PIECE):
                file.write(piece)
        os.utime(half, ns=(changed_ns, changed_ns))
        half.replace(place)


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
