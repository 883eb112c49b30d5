"""A bundle: a source directory as one deterministic archive, known by its digest.

    <folder>/<sha256>.tar.gz     the user's files, and under .cloudtrain/ the files that run them
    <folder>/<sha256>.json       what is known about it

The digest is that of the tar before compression, since compressors differ between machines. The same files give the
same digest on any of them, so that unchanged source is neither packed nor uploaded again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from cloudtrain import archive, guard
from cloudtrain.archive import LINK, PIECE, Entry
from cloudtrain.errors import BadSource, StoreError
from cloudtrain.source import RESERVED, File, Source, list_files, refusal, shown, why

__all__ = ["Bundle", "File", "list_files", "why"]
_RUNTIME = f"{RESERVED}/runtime.py"
LEVEL = 2  # of ISA-L's 0 to 3: the CPU time of 0 and 1, a little smaller


@dataclass(frozen=True)
class Bundle:
    """A packaged source; `sha256` names it, `source_sha256` covers the user's files alone."""

    path: Path  # the tar.gz
    sha256: str  # of the tar before compression
    source_sha256: str
    size_bytes: int  # of the tar.gz
    files: tuple[File, ...]  # the user's
    commit: str | None
    dirty: bool
    source: str

    @classmethod
    def make(
        cls, source: Path, into: Path, *, allow_secrets: Sequence[str] = (), must_have: Sequence[str] = ()
    ) -> Bundle:
        """Package a directory into a folder of bundles, or find the bundle there that already holds the same files.

        `must_have` names files that the job relies on; `allow_secrets` are patterns, as in .gitignore, of files that
        may hold credentials. Raises BadSource with every problem, and StoreError when the folder cannot be written.
        """
        for _ in range(3):
            found = Source.of(source)
            _require(found, must_have)
            members = _members(found)
            try:
                sha256, source_sha256 = _survey(members, allow_secrets)
                path = into / f"{sha256}.tar.gz"
                known = cls.stored(into, sha256)
                size = known.size_bytes if known else _pack(members, path, sha256)
            except _Changed as change:
                changed = change
                continue
            bundle = cls(path, sha256, source_sha256, size, found.files, found.commit, found.dirty, str(found.root))
            if known != bundle:
                bundle._remember()
            return bundle
        raise BadSource(f"{shown(str(changed))} keeps changing while it is packaged", "name it in .cloudtrainignore")

    @classmethod
    def stored(cls, into: Path, sha256: str) -> Bundle | None:
        """Return the bundle of that digest, or None when it is not there, or not whole."""
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            return None
        path = into / f"{sha256}.tar.gz"
        try:
            facts = json.loads(path.with_name(f"{sha256}.json").read_bytes())
            files = tuple(File(*file) for file in facts.pop("files"))
            bundle = cls(path=path, sha256=sha256, files=files, **facts)
            return bundle if path.stat().st_size == bundle.size_bytes else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def to_dict(self) -> dict[str, Any]:
        """Return what a plan says about its bundle."""
        return {
            "sha256": self.sha256,
            "source_sha256": self.source_sha256,
            "size_bytes": self.size_bytes,
            "files": len(self.files),
            "commit": self.commit,
            "dirty": self.dirty,
        }

    def extract(self, into: Path) -> None:
        """Unpack into a folder that is new or empty: it then holds the whole source, or nothing.

        Blocking. Raises StoreError when the archive is damaged, is not of this digest, or holds what no bundle holds.
        """
        temporary = into.with_name(f".{into.name}.{os.getpid()}-{time.monotonic_ns():x}.tmp")
        digest = hashlib.sha256()
        try:
            with _writing(into):
                temporary.mkdir(parents=True)
                with open(self.path, "rb", buffering=0) as stream:
                    archive.extract(stream, temporary, digest.update)
                if digest.hexdigest() != self.sha256:
                    raise StoreError("the archive's content is not what its name says")
                temporary.rename(into)
        except BaseException as error:
            _remove_tree(temporary)
            if isinstance(error, StoreError) and not error.hint:
                raise StoreError(f"{self.path}: {error.message}", "remove it; the next submit makes it again") from None
            raise

    def _remember(self) -> None:
        facts = {name: getattr(self, name) for name in ("source_sha256", "size_bytes", "files", "commit", "dirty",
                                                        "source")}  # fmt: skip
        with _new_file(self.path.with_name(f"{self.sha256}.json")) as stream:
            stream.write(json.dumps(facts, separators=(",", ":")).encode("utf-8", "surrogateescape"))


class Member(NamedTuple):
    """A member of the archive, and the file that its bytes come from."""

    entry: Entry
    origin: str


class _Changed(Exception):
    """A file is not what it was a moment ago."""


def runtime_files() -> list[tuple[str, Path]]:
    """Return the files that run a job on a node: path in the bundle, file of this installation."""
    package = Path(__file__).parent
    folder = next((f for f in (package / "_entrypoints", package.parent / "entrypoints") if f.is_dir()), None)
    if folder is None:
        raise StoreError("this installation of cloudtrain lacks its entrypoints", "install it again")
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("tests", "__pycache__")]
        inner = os.path.relpath(at, folder)
        prefix = f"{RESERVED}/" if inner == "." else f"{RESERVED}/{inner}/"
        found += [(prefix + name, Path(at, name)) for name in names if name.endswith(".py")]
    # once more in a folder that holds nothing else, which may stand on PYTHONPATH without shadowing the user's modules
    return found + [(f"{RESERVED}/path/cloudtrain_runtime.py", at) for path, at in found if path == _RUNTIME]


def _members(source: Source) -> list[Member]:
    root = str(source.root)
    members = [Member(Entry(*file, source.links.get(file.path, "")), f"{root}/{file.path}") for file in source.files]
    for path, file in runtime_files():
        members.append(Member(Entry(path, file.stat().st_size, 0o644), str(file)))
    return sorted(members)


def _require(source: Source, names: Sequence[str]) -> None:
    paths = {file.path for file in source.files}
    problems = []
    for name in names:
        path = os.path.normpath(name)
        if path in paths or path.startswith(f"{RESERVED}/"):
            continue
        if (source.root / path).is_file():
            problems.append(why(source.root, path))
            continue
        from difflib import get_close_matches

        near = get_close_matches(path, sorted(paths), 3, 0.6)
        problems.append(f"{shown(name)} is not there" + (f"; there is {', '.join(map(shown, near))}" if near else ""))
    if problems:
        raise refusal(f"{source.root} lacks what the job needs", problems)


def _survey(members: Sequence[Member], allow_secrets: Sequence[str]) -> tuple[str, str]:
    """Read everything once: return the digests of the archive and of the user's files, refuse credentials."""
    whole, users = hashlib.sha256(), hashlib.sha256()
    findings: list[guard.Finding] = []
    problems: list[str] = []
    for entry, origin in members:
        ours = entry.path.startswith(f"{RESERVED}/")
        own = hashlib.sha256(entry.target.encode())
        whole.update(archive.header(entry))
        if not ours and (kind := guard.suspicious_name(entry.path)):
            findings.append(guard.Finding(entry.path, 0, kind))
        try:
            for piece in _pieces(entry, origin):
                whole.update(piece)
                if not ours:
                    own.update(piece)
                    if entry.size <= guard.MAX_BYTES:
                        findings += [guard.Finding(entry.path, *at) for at in guard.search(piece)]
        except OSError as error:
            problems.append(f"{shown(entry.path)} cannot be read: {error.strerror}")
        if entry.mode != LINK:
            whole.update(archive.padding(entry.size))
        if not ours:
            users.update(b"%o %b %b\0" % (entry.mode, own.hexdigest().encode(), entry.path.encode()))
    if problems:
        raise refusal("the source cannot be packaged", problems)
    guard.refuse(findings, allow_secrets)
    whole.update(archive.END)
    return whole.hexdigest(), users.hexdigest()


def _pack(members: Sequence[Member], path: Path, sha256: str) -> int:
    """Write the archive, and return its size; raises _Changed when it would not have the digest expected."""
    from isal import isal_zlib

    digest = hashlib.sha256()
    deflate = isal_zlib.compressobj(LEVEL, wbits=31)
    with _new_file(path) as stream:

        def write(piece: bytes) -> None:
            digest.update(piece)
            stream.write(deflate.compress(piece))

        for entry, origin in members:
            write(archive.header(entry))
            for piece in _pieces(entry, origin):
                write(piece)
            if entry.mode != LINK:
                write(archive.padding(entry.size))
        write(archive.END)
        stream.write(deflate.flush())
        if digest.hexdigest() != sha256:
            raise _Changed("a file")
        return stream.tell()


def _pieces(entry: Entry, origin: str) -> Iterator[bytes]:
    """Yield exactly `entry.size` bytes: what a log gains meanwhile belongs to the next bundle."""
    if entry.mode == LINK:
        return
    try:
        fd = os.open(origin, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise
        raise _Changed(entry.path) from None
    most = guard.MAX_BYTES if entry.size <= guard.MAX_BYTES else PIECE  # the guard sees whole files
    try:
        left = entry.size
        while left:
            piece = os.read(fd, min(left, most))
            if not piece:
                raise _Changed(entry.path)
            left -= len(piece)
            yield piece
    except IsADirectoryError:
        raise _Changed(entry.path) from None
    finally:
        os.close(fd)


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name when the block ends well, and leaves nothing behind otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns():x}.tmp")
    try:
        with _writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb", opener=_private) as stream:
                yield stream
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn the file system's complaints into one sentence."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}", "make room, or set CLOUDTRAIN_HOME") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove_tree(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
