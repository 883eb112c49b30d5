"""What is known of a source's files without reading them again, as git's index knows it.

    <bundles>/.cache/<digest of the source's path>.json      one per source: a checksum, then what follows as JSON

A file is the same when its size, times of change (nanoseconds), inode and mode are. A change may hide in the grain of
a file system's clock: what had changed less than RACY_NS before it was read is therefore not kept, and read once more.
A cache that is damaged, or of other rules, counts as empty. Packers may run at once: each writes a whole file, and
every entry in it is true by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloudtrain.errors import StoreError
from cloudtrain.source.atomic import new_file

FOLDER = ".cache"  # below the bundles
RACY_NS = 2_000_000_000  # the coarsest clock of a file system in use (FAT)

Findings = list[tuple[int, str]]
Entry = list[Any]  # size, mtime, ctime, inode, mode, sha256, findings


class StatCache:
    """The digests of one source's files by path; `rules` names everything else that its findings depend on."""

    def __init__(self, bundles: Path, source: Path, rules: str) -> None:
        name = hashlib.sha256(os.fsencode(source)).hexdigest()[:32]
        self.path = bundles / FOLDER / f"{name}.json"
        self._rules = rules
        self._old = self._read()
        self._new: dict[str, Entry] = {}

    def get(self, path: str, file_stat: os.stat_result) -> tuple[str, Findings] | None:
        """Return digest and findings of a file that is as it was when it was read, else None."""
        entry = self._old.get(path)
        if entry is None or entry[:5] != signature(file_stat):
            return None
        self._new[path] = entry
        return entry[5], entry[6]

    def put(self, path: str, file_stat: os.stat_result, began_ns: int, sha256: str, findings: Findings) -> None:
        """Keep what was read of a file from that moment on, unless it had only just changed."""
        if max(file_stat.st_mtime_ns, file_stat.st_ctime_ns) + RACY_NS < began_ns:
            self._new[path] = [*signature(file_stat), sha256, findings]

    def drop(self, path: str) -> None:
        """Forget a file: it has turned out to be another."""
        self._old.pop(path, None)
        self._new.pop(path, None)

    def save(self) -> None:
        """Write what changed; a cache that cannot be written is done without."""
        if self._new == self._old:
            return
        body = json.dumps([self._rules, self._new], separators=(",", ":")).encode()
        with suppress(StoreError), new_file(self.path) as stream:
            stream.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        self._old = dict(self._new)

    def _read(self) -> dict[str, Entry]:
        try:
            checksum, _, body = self.path.read_bytes().partition(b"\n")
        except OSError:
            return {}
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            return {}
        rules, entries = json.loads(body)
        return entries if rules == self._rules else {}


def signature(file_stat: os.stat_result) -> Entry:
    """Return what says whether a file is still the same."""
    return [file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns, file_stat.st_ino, file_stat.st_mode]


def clock_ns() -> int:
    """Return the time in the terms of file systems."""
    return time.time_ns()
