"""Read, write and list files on a node. Sent to nodes as text, like agent.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

from cloudtrain.source import untrusted

AnyPath = Union[str, Path]
MOST_REQUEST = 64 << 20  # bytes of a request.json


def read(path: AnyPath, offset: int = 0, limit: int = 1 << 20) -> bytes:
    """Return at most `limit` bytes of a regular file from an offset; b"" if there is no file. Raises OSError."""
    path = expand_path(path)
    try:
        return untrusted.read_file(path.parent, path.name, limit, offset)
    except FileNotFoundError:
        return b""


def write(path: AnyPath, given: bytes = b"", mode: int = 0o600) -> None:
    """Write a file atomically. Who may read it may enter the folders that are made for it."""
    path = expand_path(path)
    make_folders(path.parent, 0o700 | mode >> 2 & 0o011 | mode & 0o044)
    partial = path.with_name(f".{path.name}.{unique_suffix()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(given)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_folders(path: AnyPath, mode: int = 0o700) -> None:
    """Make a folder and those above it that are not there, with a mode that no umask changes."""
    path = expand_path(path)
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(mode | folder.stat().st_mode & 0o2000)  # a folder's group passes on to those in it


def restrict(top: AnyPath, mode: int) -> None:
    """Give all folders below and including one a mode, and take from its files what the mode has not."""
    for at, _, names in os.walk(expand_path(top)):
        os.chmod(at, mode | os.stat(at).st_mode & 0o2000)
        for path in (os.path.join(at, name) for name in names):
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode & mode)


def modified_at(path: AnyPath) -> int:
    """Return when a file was changed, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(expand_path(path)).st_mtime_ns
    except OSError:
        return 0


def walk(path: AnyPath) -> list[list[Any]]:
    """List the files and links below a folder: path, size, mtime_ns, mode, target of a link ("" for a file)."""
    entries: list[list[Any]] = []
    top = str(expand_path(path))
    for folder_path, folders, names in os.walk(top):
        for name in sorted(
            [*names, *(folder for folder in folders if os.path.islink(os.path.join(folder_path, folder)))]
        ):
            full_path = os.path.join(folder_path, name)
            info = os.lstat(full_path)
            target = os.readlink(full_path) if os.path.islink(full_path) else ""
            if target or os.path.isfile(full_path):
                relative = os.path.relpath(full_path, top)
                entries.append([relative, info.st_size, info.st_mtime_ns, info.st_mode & 0o777, target])
    return entries


def digests(folder: AnyPath, paths: Sequence[str]) -> list[str]:
    """Return the SHA-256 of files below a folder; "" for one that cannot be read, as it was removed meanwhile."""
    import hashlib  # only here: agents start faster without

    top, found = expand_path(folder), []
    for path in paths:
        digest = hashlib.sha256()
        try:
            with open(untrusted.open_file(top, path), "rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
            found.append(digest.hexdigest())
        except OSError:
            found.append("")
    return found


def read_texts(folder: AnyPath, patterns: Sequence[str], limit: int = 1 << 20) -> dict[str, str]:
    """Return the text of files that match patterns such as node-*/status.json, by relative path; long ones: the end."""
    top, contents = expand_path(folder), {}
    if top.is_dir():
        for folder_path in [top, *(folder_path for folder_path in top.iterdir() if folder_path.is_dir())]:
            os.listdir(folder_path)  # on NFS this refreshes the cached directory
    for path in sorted({path for pattern in patterns for path in top.glob(pattern)}):
        try:
            name = str(path.relative_to(top))
            start = max(0, path.stat().st_size - limit)
            contents[name] = untrusted.read_file(top, name, limit, start).decode("utf-8", "replace")
        except OSError:
            continue  # deleted since it was listed, or no regular file
    return contents


def token(folder: AnyPath) -> str:
    """Return the shared secret of an attempt's nodes; created once, readable by this user only."""
    path = expand_path(folder) / "token"
    if not path.exists():
        partial = path.with_name(f"token.{unique_suffix()}")
        partial.touch(mode=0o600)
        partial.write_text(os.urandom(16).hex())
        try:
            os.link(partial, path)
        except FileExistsError:
            pass
        partial.unlink()
    return path.read_text()


def unique_suffix() -> str:
    """Return a suffix for a temporary file name that no other process or thread uses."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"


def expand_path(path: AnyPath) -> Path:
    """Return a path with a leading ~ expanded."""
    return path if isinstance(path, Path) else Path(os.path.expanduser(path))
