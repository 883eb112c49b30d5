"""Download objects of a store into a folder: ranged parts in parallel, continued after a break, verified.

An object arrives in `.NAME.part`, and `.NAME.parts` says which of its parts are there. A later download of the same version
continues with the others. The file gets its own name when it is complete and verified.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from cloudtrain.backends.http import CHUNK_BYTES
from cloudtrain.errors import BackendError, DiskError
from cloudtrain.job.units import format_size
from cloudtrain.source.folder_writer import folder_writer, writing

PART_BYTES = 32 << 20  # of one request
AT_ONCE = 8  # requests
TRIES = 3  # of an object that changes meanwhile, or does not arrive as it is stored


class ChangedError(Exception):
    """The object is not the version that was asked for."""


@dataclass(frozen=True)
class StoredObject:
    """An object as a store lists it.

    Args:
        name: Its path below the folder.
        uri: Its address, for messages.
        size: Bytes.
        version: Another one means other bytes: an ETag, a generation.
        modified_ns: Becomes the file's time. A file with this time and size is not downloaded again.
        read: Yields the bytes from the first to the last, both included; raises ChangedError, BackendError.
        verify: Returns whether a file has the checksum that the store knows; None if it knows none.
        refresh: Returns the object as it is now, under any name; None if it is gone.
    """

    name: str
    uri: str
    size: int
    version: str
    modified_ns: int
    read: Callable[[int, int], Iterator[bytes]]
    verify: Callable[[Path], bool | None]
    refresh: Callable[[], StoredObject | None]


def download_all(objects: Iterable[StoredObject], into: Path, stop: Callable[[], bool] = lambda: False) -> int:
    """Download objects into a folder and return how many there are; blocking.

    Files that are there already are left as they are. `stop` is called between two chunks.
    Raises BackendError, also for a name that leads out of the folder; DiskError where a file cannot be written.
    """
    stored = list(objects)
    folders = {one.name[:at] for one in stored for at, letter in enumerate(one.name) if letter == "/"}
    for one in stored:
        check_name(one.name, one.uri)
    for one in stored:
        if one.name in folders:
            raise BackendError(
                f"{one.uri} has a name that is also a folder of other objects: it cannot be written as a file"
            )
    if not stored:
        return 0
    with folder_writer(into) as writer, ThreadPoolExecutor(AT_ONCE, "fetch") as pool:
        download = _Download(into, writer, stop)
        try:
            there = pool.map(download.is_there, stored)
            missing = [one for one, is_there in zip(stored, there, strict=True) if not is_there]
            download.check_space(missing)
            _all(pool, download.fetch, [one for one in missing if one.size <= PART_BYTES])
            for one in missing:
                if one.size > PART_BYTES:
                    download.fetch(one, pool)
        except _Stopped:
            pass
        finally:
            download.stopped = True  # after Ctrl-C the threads end with their next chunk
        if download.error is not None:
            raise download.error
    return len(stored)


def check_name(name: str, uri: str) -> None:
    """Raise BackendError for an object whose name would lead out of a folder."""
    if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name:
        raise BackendError(f"{uri} has the name {name!r}, which no file here can have")


def digest(path: Path, algorithm: str, sizes: Sequence[int] | None = None) -> bytes:
    """Return a file's checksum, crc32 or one of hashlib's; with `sizes` that of the checksums of its parts."""
    with open(path, "rb") as file:
        if sizes is None:
            return _hash_part(file, algorithm, sys.maxsize)
        digests = b"".join(_hash_part(file, algorithm, size) for size in sizes)
    return hashlib.new(algorithm, digests, usedforsecurity=False).digest()


def _hash_part(file: IO[bytes], algorithm: str, size: int) -> bytes:
    crc, hasher = 0, None if algorithm == "crc32" else hashlib.new(algorithm, usedforsecurity=False)
    while chunk := file.read(min(size, CHUNK_BYTES)):
        size -= len(chunk)
        if hasher is None:
            crc = zlib.crc32(chunk, crc)
        else:
            hasher.update(chunk)
    return crc.to_bytes(4, "big") if hasher is None else hasher.digest()


class _Stopped(Exception):
    """The caller wants no more, or another object failed."""


class _Download:
    def __init__(self, into: Path, writer: Any, stop: Callable[[], bool]) -> None:
        self._into, self._writer, self._stop = into, writer, stop
        self.stopped = False
        self.error: Exception | None = None  # the first

    def is_there(self, stored: StoredObject) -> bool:
        """Return whether the file is the object, by its size and time, or by its checksum."""
        status = self._writer.stat(stored.name)
        if status is None or status.st_size != stored.size:
            return False
        return status.st_mtime_ns == stored.modified_ns or stored.verify(self._into / stored.name) is True

    def check_space(self, missing: list[StoredObject]) -> None:
        """Raise DiskError if the disk cannot hold what is missing."""
        parts = [self._writer.stat(_beside(one.name, "part")) for one in missing]
        needed = sum(one.size for one in missing) - sum(part.st_blocks * 512 for part in parts if part)
        disk = shutil.disk_usage(self._into)
        if disk.total and needed > disk.free:  # some network file systems report 0 of 0
            reason = f"it needs {format_size(needed)}, and {format_size(disk.free)} are free"
            raise DiskError(self._into, OSError(errno.ENOSPC, reason))

    def fetch(self, stored: StoredObject, pool: ThreadPoolExecutor | None = None) -> None:
        """Download one object; an object that changes meanwhile, or arrives damaged, is downloaded again."""
        try:
            newest: StoredObject | None = stored
            for _ in range(TRIES):
                if newest is None:
                    raise BackendError(f"{stored.uri} was deleted while it was downloaded")
                if self._fetch_version(newest, pool):
                    return
                newest = stored.refresh()
                newest = newest and replace(newest, name=stored.name)
            raise BackendError(
                f"{stored.uri} differs from the stored file after the download ({TRIES} tries)", "run fetch again later"
            )
        except Exception as error:
            if self.error is None and not isinstance(error, _Stopped):
                self.error, self.stopped = error, True
            raise _Stopped from None

    def _fetch_version(self, stored: StoredObject, pool: ThreadPoolExecutor | None) -> bool:
        """Download one version of an object; False if it has changed, or its checksum is another one."""
        path = self._into / stored.name
        part, state = _beside(stored.name, "part"), _beside(stored.name, "parts")
        with writing(path):
            with self._open(state, "a+") as lines:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(lines, fcntl.LOCK_EX)  # another process may download the same file
                intact = self.is_there(stored)
                if not intact:
                    fetch = partial(self._fetch_part, stored, part, lines)
                    try:
                        _all(pool, fetch, self._missing_parts(lines, part, stored))
                        intact = stored.verify(self._into / part) is not False
                    except ChangedError:
                        pass
                    if intact:
                        if stored.modified_ns:
                            with self._open(part, "rb") as file:
                                os.utime(file.fileno(), ns=(stored.modified_ns, stored.modified_ns))
                        self._writer.move(part, stored.name)
                self._writer.remove(state)
        return intact

    def _open(self, name: str, mode: str) -> IO[Any]:
        return open(name, mode, opener=self._writer.opener)

    def _fetch_part(self, stored: StoredObject, part: str, lines: IO[str], number: int) -> None:
        first = number * PART_BYTES
        last = min(first + PART_BYTES, stored.size) - 1
        with self._open(part, "r+b") as file:
            file.seek(first)
            for chunk in stored.read(first, last) if stored.size else ():
                if self.stopped or self._stop():
                    raise _Stopped
                file.write(chunk)
            if file.tell() != last + 1:
                raise ChangedError
        lines.write(f"{number}\n")
        lines.flush()

    def _missing_parts(self, lines: IO[str], part: str, stored: StoredObject) -> list[int]:
        """Return the numbers of the parts that are not there yet; begins anew for another version."""
        version = f"{stored.version} {stored.size} {PART_BYTES}"
        lines.seek(0)
        known = lines.read().splitlines()
        if known[:1] != [version] or self._writer.stat(part) is None:
            known = [version]
            self._open(part, "wb").close()
            lines.truncate(0)
            lines.write(f"{version}\n")
            lines.flush()
        done = {int(line) for line in known[1:] if line.isdigit()}
        return [number for number in range(max(1, -(-stored.size // PART_BYTES))) if number not in done]


def _all(pool: ThreadPoolExecutor | None, function: Callable[[Any], None], items: list[Any]) -> None:
    """Call a function for all items, with a pool in its threads; when all have ended, raise what the first one raised."""
    if pool is None:
        for item in items:
            function(item)
        return
    futures = [pool.submit(function, item) for item in items]
    wait(futures, return_when=FIRST_EXCEPTION)
    begun = [future for future in futures if not future.cancel()]
    for future in begun:
        future.exception()
    for future in begun:
        future.result()


def _beside(name: str, suffix: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}.{suffix}"
