"""A survey of what goes into a bundle: every file's digest and what is suspicious in it, read only where unknown.

    <bundles>/.cache/<digest of the source's path>.json      one per source: a checksum, then its files as JSON

As in git's index, a file is the same when its size, times of change (nanoseconds), inode and mode are. A change may hide
in the grain of a file system's clock: what had changed less than RACY_NS before it was read is therefore not kept, and
read once more. A cache that is damaged, or of other rules, counts as empty. Packers may run at once: each writes a whole
file, and every entry in it is true by itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.clock import SYSTEM
from cloudtrain.errors import StoreError
from cloudtrain.job.homes import new_file
from cloudtrain.source import archive, limits, secrets
from cloudtrain.source.archive import LINK, PIECE, Entry
from cloudtrain.source.files import RESERVED, refusal, shown

FOLDER = ".cache"  # below the bundles
RACY_NS = 2_000_000_000  # the coarsest clock of a file system in use (FAT)

Findings = list[tuple[int, str]]
Facts = list[Any]  # of a file: size, mtime, ctime, inode, mode, sha256, findings


class Member(NamedTuple):
    """A member of the archive, the file that its bytes come from, and how that was when it was listed."""

    entry: Entry
    origin: str
    file_stat: os.stat_result

    @property
    def ours(self) -> bool:
        return self.entry.path.startswith(f"{RESERVED}/")


class Changed(Exception):
    """A file is not what it was a moment ago."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Survey(NamedTuple):
    """What is known of all members: digests in their order, the archive's key, the source's digest, the findings."""

    digests: list[str]
    key: str  # the same for the same archive, and known without its bytes
    source_sha256: str  # of the user's files alone
    findings: list[secrets.Finding]


def take(members: Sequence[Member], cache: StatCache) -> Survey:
    """Survey the members; raises BadSource with every file that cannot be read, and Changed."""
    key, users = hashlib.sha256(archive.FORMAT), hashlib.sha256()
    digests: list[str] = []
    findings: list[secrets.Finding] = []
    problems: list[str] = []
    for member in members:
        entry, path = member.entry, member.entry.path
        try:
            own, seen = _facts(member, cache)
        except OSError as error:
            problems.append(f"{shown(path)} cannot be read: {error.strerror}")
            continue
        digests.append(own)
        line = b"%o %b %b\0" % (entry.mode, own.encode(), path.encode())
        key.update(b"%d " % entry.size + line)
        if not member.ours:
            users.update(line)
            findings += _findings(path, seen)
    if problems:
        raise refusal("the source cannot be packaged", problems)
    return Survey(digests, key.hexdigest(), users.hexdigest(), findings)


def _facts(member: Member, cache: StatCache) -> tuple[str, Findings]:
    """Return a member's digest and findings: known, or read now."""
    entry, _, file_stat = member
    if entry.mode == LINK:
        return hashlib.sha256(entry.target.encode()).hexdigest(), []
    if cached := cache.get(entry.path, file_stat):
        return cached
    began = clock_ns()
    own, seen, after = _read(member)
    if signature(after) == signature(file_stat):
        cache.put(entry.path, file_stat, began, own, seen)
    return own, seen


def look(member: Member) -> list[secrets.Finding]:
    """Return what is suspicious in one member of the user's; raises Changed and OSError."""
    return _findings(member.entry.path, [] if member.entry.mode == LINK else _read(member)[1])


def _findings(path: str, seen: Findings) -> list[secrets.Finding]:
    kind = secrets.suspicious_name(path)
    return [secrets.Finding(path, 0, kind)] * bool(kind) + [secrets.Finding(path, *at) for at in seen]


def _read(member: Member) -> tuple[str, Findings, os.stat_result]:
    """Read a file: return its digest, what is suspicious in it, and how it was afterwards."""
    own = hashlib.sha256()
    seen: Findings = []
    with opened(member) as fd:
        for piece in pieces(fd, member.entry):
            own.update(piece)
            if not member.ours and member.entry.size <= secrets.credentials().MAX_BYTES:
                seen += secrets.search(piece)
                if piece.startswith(b"version ") and limits.is_pointer(piece):
                    seen.append((1, limits.POINTER))
        return own.hexdigest(), seen, os.fstat(fd)


@contextmanager
def opened(member: Member) -> Iterator[int]:
    """Open a member's file, and only a plain file; raises Changed when it is something else by now."""
    try:
        fd = os.open(member.origin, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise
        raise Changed(member.entry.path) from None
    try:
        yield fd
    except IsADirectoryError:
        raise Changed(member.entry.path) from None
    finally:
        os.close(fd)


def pieces(fd: int, entry: Entry) -> Iterable[bytes]:
    """Yield exactly `entry.size` bytes: what a log gains meanwhile belongs to the next bundle."""
    most = (
        secrets.credentials().MAX_BYTES if entry.size <= secrets.credentials().MAX_BYTES else PIECE
    )  # the guard sees whole files
    left = entry.size
    while left:
        piece = os.read(fd, min(left, most))
        if not piece:
            raise Changed(entry.path)
        left -= len(piece)
        yield piece


class StatCache:
    """The digests of one source's files by path; `rules` names everything else that its findings depend on."""

    def __init__(self, bundles: Path, source: Path, rules: str) -> None:
        name = hashlib.sha256(os.fsencode(source)).hexdigest()[:32]
        self.path = bundles / FOLDER / f"{name}.json"
        self._rules = rules
        self._old = self._read()
        self._new: dict[str, Facts] = {}

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

    def _read(self) -> dict[str, Facts]:
        try:
            checksum, _, body = self.path.read_bytes().partition(b"\n")
        except OSError:
            return {}
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            return {}
        rules, entries = json.loads(body)
        return entries if rules == self._rules else {}


def signature(file_stat: os.stat_result) -> Facts:
    """Return what says whether a file is still the same."""
    return [file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns, file_stat.st_ino, file_stat.st_mode]


def clock_ns() -> int:
    """Return the time in the terms of file systems."""
    return int(SYSTEM.now() * 1e9)
