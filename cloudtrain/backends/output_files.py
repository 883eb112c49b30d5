"""The files of a run's output as somebody else's machine sees them: a folder, s3:// or gs://. `add` alone writes there.

What they hold was written by others. Names are relative, links of a folder are not followed, and what is larger than it
may be is not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from cloudtrain.backends import s3
from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.download import StoredObject
from cloudtrain.backends.gcs import Bucket
from cloudtrain.backends.google import ApiError, GoogleApi
from cloudtrain.errors import BackendError, BadRequest
from cloudtrain.source.folder_writer import copy_tree

MOST_NAMES = 500_000  # of one listing
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


class OutputFiles(Protocol):
    """Files below one URI. Every call blocks; raises BackendError, MissingExtra."""

    uri: str

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly below, in pages; links are left out."""
        ...

    def sizes(self, below: str) -> dict[str, int]:
        """Return name -> bytes of what lies below a folder; names that we never write are left out."""
        ...

    def digest(self, below: str) -> str:
        """Return a digest of what lies below a folder, "" where nothing does: of the bytes, or of a store's versions."""
        ...

    def read(self, name: str, most: int) -> bytes | None:
        """Return a file's bytes, None where there is none; raises BackendError where there are more than `most`."""
        ...

    def add(self, name: str, data: bytes) -> None:
        """Write a small file of a new name; one of that name stays as it is."""
        ...

    def bring(self, folder: str, into: Path, named: Callable[[str], str] = str) -> None:
        """Copy a folder; what is here already is not read again where that can be told. `named` gives names, "" for none."""
        ...


def opened(uri: str, aws: Aws | None = None) -> OutputFiles:
    """Return the files of a path, file://, s3:// or gs://; nothing is asked yet. Raises BadRequest.

    `aws` reads s3://; without it the variables of the environment say which credentials and endpoint do.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme == "file":
        return _Folder(Path(rest if mark else uri).expanduser().absolute())
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if scheme not in ("s3", "gs") or not bucket or not prefix:
        raise BadRequest(f"{uri} is not a folder, s3://bucket/... or gs://bucket/...")
    return _S3(bucket, prefix, aws) if scheme == "s3" else _Google(bucket, prefix)


def digest_objects(aws: Aws, uri: str) -> str:
    """Return a digest of the versions of the objects below s3://bucket/prefix/, or of the one at s3://bucket/key; "" for none."""
    return _digest((one.name, one.version) for one in s3.list_objects(aws, uri))


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path, self.uri = path, str(path)

    def folders(self) -> Iterator[str]:
        try:
            with os.scandir(self._path) as entries:
                yield from (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError as error:
            raise BackendError(f"{self._path} cannot be listed: {error.strerror}") from None

    def sizes(self, below: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for path, about in self._walk(self._path / below):
            name = path.relative_to(self._path / below).as_posix()
            if _NAME.fullmatch(name) and not path.is_symlink():
                sizes[name] = about.st_size
            _bounded(len(sizes), self.uri)
        return sizes

    def digest(self, below: str) -> str:
        top = self._path / below
        return _digest((path.relative_to(top).as_posix(), _content(path)) for path, _ in self._walk(top))

    def _walk(self, top: Path) -> Iterator[tuple[Path, os.stat_result]]:
        for folder, _, names in os.walk(top):  # it goes into no links
            for name in names:
                path = Path(folder) / name
                try:
                    yield path, path.lstat()
                except OSError:
                    continue  # it has gone since it was listed

    def read(self, name: str, most: int) -> bytes | None:
        path = self._path / name
        try:
            if any(part.is_symlink() for part in (path, *path.parents) if part.is_relative_to(self._path / "x" / "..")):
                return None
            with open(path, "rb") as file:
                data = file.read(most + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BackendError(f"{path} cannot be read: {error.strerror}") from None
        return _sized(data, most, str(path))

    def add(self, name: str, data: bytes) -> None:
        path = self._path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            return
        except OSError as error:
            raise BackendError(f"{path} cannot be written: {error.strerror}") from None

    def bring(self, folder: str, into: Path, named: Callable[[str], str] = str) -> None:
        top = self._path / folder
        if top.is_dir() and not top.is_symlink():
            copy_tree(top, into, named=named)


class _S3:
    def __init__(self, bucket: str, prefix: str, aws: Aws | None) -> None:
        self._bucket, self._prefix, self.uri = bucket, prefix, f"s3://{bucket}/{prefix}"
        if aws is not None:
            self.aws = aws
            return
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        self.aws = Aws("sagemaker", region, None, endpoint)

    def folders(self) -> Iterator[str]:
        return s3.list_folders(self.aws, f"{self.uri}/")

    def sizes(self, below: str) -> dict[str, int]:
        return _sizes(s3.list_objects(self.aws, f"{self.uri}/{below}/"), self.uri)

    def digest(self, below: str) -> str:
        return _digest((one.name, one.version) for one in s3.list_objects(self.aws, f"{self.uri}/{below}/"))

    def read(self, name: str, most: int) -> bytes | None:
        try:
            answer = self.aws.call("s3", "get_object", Bucket=self._bucket, Key=f"{self._prefix}/{name}")
        except AwsError as error:
            if error.code in ("NoSuchKey", "404"):
                return None
            raise
        return _sized(answer["Body"].read(most + 1), most, f"{self.uri}/{name}")

    def add(self, name: str, data: bytes) -> None:
        try:
            key = f"{self._prefix}/{name}"
            self.aws.call("s3", "put_object", Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*")
        except AwsError as error:
            if error.code not in ("PreconditionFailed", "412"):
                raise

    def bring(self, folder: str, into: Path, named: Callable[[str], str] = str) -> None:
        s3.download_prefix(self.aws, f"{self.uri}/{folder}/", into, named=named)


class _Google:
    def __init__(self, bucket: str, prefix: str) -> None:
        self._prefix, self.uri = prefix, f"gs://{bucket}/{prefix}"
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        self._bucket = Bucket(GoogleApi("", (lambda: emulator.rstrip("/")) if emulator else None), bucket)

    def folders(self) -> Iterator[str]:
        return self._bucket.list_folders(f"{self._prefix}/")

    def sizes(self, below: str) -> dict[str, int]:
        return _sizes(self._bucket.list_objects(f"{self._prefix}/{below}/"), self.uri)

    def digest(self, below: str) -> str:
        return _digest((one.name, one.version) for one in self._bucket.list_objects(f"{self._prefix}/{below}/"))

    def read(self, name: str, most: int) -> bytes | None:
        data = bytearray()
        try:
            for chunk in self._bucket.read(f"{self._prefix}/{name}"):
                data += chunk
                if len(data) > most:
                    break
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return _sized(bytes(data), most, f"{self.uri}/{name}")

    def add(self, name: str, data: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self._bucket.upload_once(Path(file.name), f"{self._prefix}/{name}")

    def bring(
        self, folder: str, into: Path, named: Callable[[str], str] = str
    ) -> None:  # nothing of SageMaker is there
        self._bucket.download_prefix(f"{self._prefix}/{folder}/", into)


def _sizes(objects: Iterable[StoredObject], uri: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for stored in objects:
        if _NAME.fullmatch(stored.name):
            sizes[stored.name] = stored.size
        _bounded(len(sizes), uri)
    return sizes


def _digest(files: Iterable[tuple[str, str]]) -> str:
    rows = sorted(files)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BackendError(f"{path} cannot be read: {error.strerror}") from None


def _sized(data: bytes, most: int, what: str) -> bytes:
    if len(data) > most:
        raise BackendError(f"{what} has more than {most:,} bytes: it does not belong to a run's history")
    return data


def _bounded(count: int, uri: str) -> None:
    if count > MOST_NAMES:
        raise BackendError(f"{uri} holds more than {MOST_NAMES:,} files of a history")
