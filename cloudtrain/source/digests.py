"""A survey of what goes into a bundle: every file's digest and what is suspicious in it, read only where unknown."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from cloudtrain.source import archive, limits, secrets, stat_cache
from cloudtrain.source.archive import LINK, PIECE, Entry
from cloudtrain.source.files import RESERVED, refusal, shown
from cloudtrain.source.stat_cache import Findings, StatCache, signature


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
    began = stat_cache.clock_ns()
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
            if not member.ours and member.entry.size <= secrets.MAX_BYTES:
                seen += secrets.search(piece)
                if limits.is_pointer(piece):
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
    most = secrets.MAX_BYTES if entry.size <= secrets.MAX_BYTES else PIECE  # the guard sees whole files
    left = entry.size
    while left:
        piece = os.read(fd, min(left, most))
        if not piece:
            raise Changed(entry.path)
        left -= len(piece)
        yield piece
