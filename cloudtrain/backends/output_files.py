"""The files of a run's output as somebody else's machine sees them: a folder, s3:// or gs://. `add` alone writes there.

What they hold was written by others. Names are relative, links of a folder are not followed, what is no regular file or
larger than it may be is not read, and a transfer that takes too long is ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from cloudtrain.backends import s3
from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.download import StoredObject
from cloudtrain.backends.gcs import Bucket
from cloudtrain.backends.google import ApiError, GoogleApi
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadRequest
from cloudtrain.source import untrusted
from cloudtrain.source.folder_writer import copy_tree
from cloudtrain.source.node_code import module

MOST_NAMES = untrusted.MOST_ENTRIES  # of one listing
PIECE = 64 << 10  # bytes between two looks at the clock
BEGIN_S, SLOWEST = 60.0, 16 << 10  # seconds, then bytes a second: a slower transfer is ended
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


class NotRead(BackendError):
    """Somebody else's file or folder is not read: it is a link or a device, or larger than it may be."""


_REPORTED: set[str] = set()


def report(refused: NotRead) -> None:
    """Write once what is not read, where the rest is still shown."""
    if refused.message not in _REPORTED and len(_REPORTED) < 1000:
        _REPORTED.add(refused.message)
        logging.getLogger(__name__).warning("%s", refused.message)


class OutputFiles(Protocol):
    """Files below one URI. Every call blocks; raises BackendError, MissingExtra."""

    uri: str

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly below, in pages; links are left out, and what is behind MOST_NAMES."""
        ...

    def sizes(self, below: str) -> dict[str, int]:
        """Return name -> bytes of what lies below a folder, -1 for what is no regular file; names that we never write are
        left out. Raises NotRead.
        """
        ...

    def digest(self, below: str) -> str:
        """Return a digest of what lies below a folder, "" where nothing does: of the bytes, or of a store's versions."""
        ...

    def read(self, name: str, most: int) -> bytes | None:
        """Return a file's bytes, None where there is none; raises NotRead for no regular file and more than `most` bytes."""
        ...

    def add(self, name: str, data: bytes) -> None:
        """Write a small file of a new name; one of that name stays as it is."""
        ...

    def bring(self, folder: str, into: Path, named: Callable[[str], str] = str) -> None:
        """Copy a folder; what is here already is not read again where that can be told. `named` gives names, "" for none."""
        ...


def opened(uri: str, aws: Aws | None = None, *, may_be_link: bool = True) -> OutputFiles:
    """Return the files of a path, file://, s3:// or gs://; nothing is asked yet. Raises BadRequest.

    Args:
        aws: reads s3://; without it the variables of the environment say which credentials and endpoint do.
        may_be_link: whether the folder itself may be a link; False where others can make it one.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme == "file":
        return _Folder(Path(rest if mark else uri).expanduser().absolute(), may_be_link)
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if scheme not in ("s3", "gs") or not bucket or not prefix:
        raise BadRequest(f"{uri} is not a folder, s3://bucket/... or gs://bucket/...")
    return _S3(bucket, prefix, aws) if scheme == "s3" else _Google(bucket, prefix)


def digest_objects(aws: Aws, uri: str) -> str:
    """Return a digest of the versions of the objects below s3://bucket/prefix/, or of the one at s3://bucket/key; "" for none."""
    return _digest((one.name, one.version) for one in s3.list_objects(aws, uri))


class _Folder:
    def __init__(self, path: Path, may_be_link: bool = True) -> None:
        self._path = path = path.resolve() if ".." in path.parts else path
        self.uri = str(path)
        self._root, self._prefix = (path, "") if may_be_link else (path.parent, path.name)

    def folders(self) -> Iterator[str]:
        count = 0
        try:
            with os.scandir(self._path) as entries:
                for count, entry in enumerate(entries):
                    if count >= MOST_NAMES:
                        report(NotRead(f"only the first {MOST_NAMES:,} entries of {self._path} are read"))
                        return
                    if entry.is_dir(follow_symlinks=False):
                        yield entry.name
        except OSError as error:
            raise BackendError(f"{self._path} cannot be listed: {error.strerror}") from None

    def sizes(self, below: str) -> dict[str, int]:
        return {
            name: about.st_size if stat.S_ISREG(about.st_mode) else -1
            for name, about in self._files(below)
            if _NAME.fullmatch(name)
        }

    def digest(self, below: str) -> str:
        return _digest(
            (name, self._content(f"{below}/{name}", about))
            for name, about in self._files(below)
            if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode)
        )

    def _files(self, below: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            yield from untrusted.walk(self._root, self._below(below), MOST_NAMES)
        except OSError as error:
            hint = "if you trust it, give the folder that the link leads to" if self._path.is_symlink() else ""
            raise NotRead(f"{self._path / below} cannot be listed: {error.strerror}", hint) from None

    def _below(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _content(self, name: str, about: os.stat_result) -> str:
        path, below = self._path / name, self._below(name)
        try:
            if stat.S_ISLNK(about.st_mode):
                return f"-> {path.readlink()}"
            hasher = hashlib.sha256()
            with open(untrusted.open_file(self._root, below), "rb", buffering=0) as file:
                left = os.fstat(file.fileno()).st_size  # it may grow for ever
                while piece := file.read(min(left, 1 << 20)):
                    hasher.update(piece)
                    left -= len(piece)
            return hasher.hexdigest()
        except OSError as error:
            raise NotRead(f"{path} cannot be read: {error.strerror}") from None

    def read(self, name: str, most: int) -> bytes | None:
        try:
            data = untrusted.read_file(self._root, self._below(name), most + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotRead(f"{self._path / name} cannot be read: {error.strerror}") from None
        return _bounded([data], most, str(self._path / name))

    def add(self, name: str, data: bytes) -> None:
        try:
            with suppress(FileNotFoundError):  # a link there belongs to others: it is neither followed nor replaced
                os.close(untrusted.open_folder(self._root, self._below(name.rpartition("/")[0])))
            with (
                module("launcher.folder_writer").FolderWriter(self._root) as writer,
                open(self._below(name), "xb", opener=writer.opener) as file,
            ):
                file.write(data)
        except FileExistsError:
            return
        except OSError as error:
            raise BackendError(f"{self._path / name} cannot be written: {error.strerror}") from None

    def bring(self, folder: str, into: Path, named: Callable[[str], str] = str) -> None:
        try:
            os.close(untrusted.open_folder(self._root, self._below(folder)))
        except OSError:
            return
        copy_tree(self._path / folder, into, named=named)


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
        chunks = answer["Body"].iter_chunks(PIECE)
        data: bytes = self.aws.explained(lambda: _bounded(chunks, most, f"{self.uri}/{name}"), "s3:GetObject")
        return data

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
        try:
            return _bounded(self._bucket.read(f"{self._prefix}/{name}"), most, f"{self.uri}/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

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
    for count, stored in enumerate(objects):
        if count >= MOST_NAMES:
            raise NotRead(f"{uri} holds more than {MOST_NAMES:,} files of a history")
        if _NAME.fullmatch(stored.name):
            sizes[stored.name] = stored.size
    return sizes


def _digest(files: Iterable[tuple[str, str]]) -> str:
    rows = sorted(files)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""


def _bounded(chunks: Iterable[bytes], most: int, what: str, clock: Clock = SYSTEM) -> bytes:
    """Return the bytes of a file that arrives in chunks; raises NotRead when they are too many, or come too slowly."""
    data, began = bytearray(), clock.monotonic()
    for chunk in chunks:
        data += chunk
        if len(data) > most:
            raise NotRead(f"{what} has more than {most:,} bytes: it does not belong to a run's history")
        if (took_s := clock.monotonic() - began) > BEGIN_S + len(data) / SLOWEST:
            raise NotRead(f"{what} arrives too slowly: {len(data):,} bytes in {took_s:.0f} s")
    return bytes(data)
