"""The files below one URI as all stores offer them: list, read, create once, delete, download.

What a store holds was written by others. Names are relative, what is larger than it may be is not read, and a transfer
that takes too long is ended.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError
from cloudtrain.source import untrusted
from cloudtrain.source.node_code import module

if TYPE_CHECKING:
    from cloudtrain.backends.store.download import StoredObject

MOST_NAMES = untrusted.MOST_ENTRIES  # of one listing
PIECE = 64 << 10  # bytes between two looks at the clock
BEGIN_S, SLOWEST = 60.0, 16 << 10  # seconds, then bytes a second: a slower transfer is ended
NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)  # those that we write


class NotRead(BackendError):
    """Somebody else's file or folder is not read: it is a link or a device, or larger than it may be."""


_REPORTED: set[str] = set()


def report(refused: NotRead) -> None:
    """Write once what is not read, where the rest is still shown."""
    if refused.message not in _REPORTED and len(_REPORTED) < 1000:
        _REPORTED.add(refused.message)
        logging.getLogger(__name__).warning("%s", refused.message)


class Files(ABC):
    """Files below one URI. Every call blocks; raises BackendError, MissingExtra."""

    uri: str

    @abstractmethod
    def folders(self) -> Iterator[str]:
        """Yield the names of the folders directly below, in pages; links are left out, and what is behind MOST_NAMES."""

    @abstractmethod
    def sizes(self, below: str) -> dict[str, int]:
        """Return name -> bytes of what lies below a folder, -1 for what is no regular file; names that we never write are
        left out. Raises NotRead.
        """

    @abstractmethod
    def digest(self, below: str) -> str:
        """Return a digest of what lies below a folder, "" where nothing does: of the bytes, or of a store's versions."""

    @abstractmethod
    def read(self, name: str, most: int) -> bytes | None:
        """Return a file's bytes, None where there is none; raises NotRead for no regular file and more than `most` bytes."""

    @abstractmethod
    def add(self, name: str, data: bytes | Path) -> bool:
        """Write bytes, or a file of this machine, under a new name; False where one of that name is, which stays as it is.

        Of several processes that add one name, one gets True. Raises OSError where the file cannot be read.
        """

    @abstractmethod
    def bring(self, below: str, into: Path, named: Callable[[str], str] = str) -> None:
        """Copy a folder; what is here already is not read again where that can be told. `named` gives names, "" for none.

        Raises BackendError, also for a name that would lead out of `into`, and DiskError.
        """


class Objects(Files):
    """Files in a bucket: `uri` is SCHEME://BUCKET, or a key or prefix in it.

    A name is relative to `uri`; an empty one is the object of `uri` itself.
    """

    def __init__(self, uri: str) -> None:
        self.bucket, _, self._key = uri.partition("://")[2].partition("/")
        self.uri = uri.rstrip("/")

    def key(self, name: str) -> str:
        """Return the key of a name."""
        folder = self._key.rstrip("/")
        return f"{folder}/{name}" if folder and name else name or self._key

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects whose keys begin so, each with its whole key as its name."""

    @abstractmethod
    def check_credentials(self) -> None:
        """Raise MissingExtra, or BackendError without credentials; blocking. No answer is no error."""

    @abstractmethod
    def look_up(self, name: str) -> StoredObject | None:
        """Return an object, None where there is none."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is gone is no error."""

    def objects(self, below: str = "") -> Iterator[StoredObject]:
        """Yield the objects below a folder, named relative to it."""
        prefix = self._prefix(below)
        for one in self._list(prefix):
            name = one.name[len(prefix) :]
            if name and not name.endswith("/"):  # consoles make empty objects for folders
                yield replace(one, name=name)

    def at_uri(self) -> Iterator[StoredObject]:
        """Yield the object of the URI, or those below it where it was given with a / at its end."""
        if not self._key or self._key.endswith("/"):
            yield from self.objects()
        elif one := self.look_up(""):
            yield one

    def sizes(self, below: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for count, stored in enumerate(self.objects(below)):
            if count >= MOST_NAMES:
                raise NotRead(f"{self.uri} holds more than {MOST_NAMES:,} files of a history")
            if NAME.fullmatch(stored.name):
                sizes[stored.name] = stored.size
        return sizes

    def digest(self, below: str) -> str:
        return digest_objects(self.objects(below))

    def bring(self, below: str, into: Path, named: Callable[[str], str] = str) -> None:
        from cloudtrain.backends.store import download  # a submit does not need it

        objects = {name: replace(one, name=name) for one in self.objects(below) if (name := named(one.name))}
        download.download_all(objects.values(), into)

    def bring_archive(self, name: str, into: Path) -> None:
        """Download a tar.gz and unpack it into a folder, or else the folder of its name; none is no error.

        The job's code wrote the archive, so it is not trusted: names that lead out of the folder and devices are refused.
        Raises BackendError, DiskError.
        """
        from cloudtrain.backends.store import download
        from cloudtrain.source.folder_writer import folder_writer

        stored = self.look_up(name)
        if stored is None:  # SageMaker leaves it out with CompressionType NONE
            self.bring(name.removesuffix(".tar.gz"), into)
            return
        stored = replace(stored, name=f".{into.name}.tar.gz")
        path = into.parent / stored.name
        download.download_all([stored], into.parent)
        code = module("launcher.folder_writer")
        with folder_writer(into) as writer:
            try:
                with tarfile.open(path, mode="r:gz") as archive:
                    code.unpack(archive, writer)
            except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, code.Unsafe) as error:
                path.unlink()
                hint = "repeat the command; when it fails again, the archive in the bucket is damaged"
                raise BackendError(f"{stored.uri} cannot be unpacked: {error}", hint) from None
        path.unlink()

    def _prefix(self, below: str) -> str:
        folder = self.key(below).rstrip("/")
        return f"{folder}/" if folder else ""


def digest_objects(objects: Iterable[StoredObject]) -> str:
    """Return a digest of the versions of objects; "" for none."""
    return digest_names((one.name, one.version) for one in objects)


def digest_names(files: Iterable[tuple[str, str]]) -> str:
    """Return a digest of names with their versions or digests; "" for none."""
    rows = sorted(files)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""


def bounded(chunks: Iterable[bytes], most: int, what: str, clock: Clock = SYSTEM) -> bytes:
    """Return the bytes of a file that arrives in chunks; raises NotRead when they are too many, or come too slowly."""
    data, began = bytearray(), clock.monotonic()
    for chunk in chunks:
        data += chunk
        if len(data) > most:
            raise NotRead(f"{what} has more than {most:,} bytes: it does not belong to a run's history")
        if (took_s := clock.monotonic() - began) > BEGIN_S + len(data) / SLOWEST:
            raise NotRead(f"{what} arrives too slowly: {len(data):,} bytes in {took_s:.0f} s")
    return bytes(data)
