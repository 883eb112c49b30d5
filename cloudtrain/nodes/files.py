"""Files on a node: read and written in pieces, listed. Sent to nodes as text, like agent.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

Place = Union[str, Path]


def read(path: Place, offset: int = 0, limit: int = 1 << 20) -> bytes:
    """Return at most `limit` bytes of a file behind an offset; nothing where there is no file."""
    try:
        with open(path_of(path), "rb") as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


def write(path: Place, given: bytes = b"", mode: int = 0o600) -> None:
    """Replace a file, all or nothing."""
    path = path_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{unique()}")
    try:
        with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(given)
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def walk(path: Place) -> list[list[Any]]:
    """Return the files and links below a folder: path, size, mtime_ns, mode, target of a link ("" for a file)."""
    found: list[list[Any]] = []
    top = str(path_of(path))
    for at, folders, names in os.walk(top):
        for name in sorted([*names, *(folder for folder in folders if os.path.islink(os.path.join(at, folder)))]):
            whole = os.path.join(at, name)
            seen = os.lstat(whole)
            target = os.readlink(whole) if os.path.islink(whole) else ""
            if target or os.path.isfile(whole):
                inner = os.path.relpath(whole, top)
                found.append([inner, seen.st_size, seen.st_mtime_ns, seen.st_mode & 0o777, target])
    return found


def texts(folder: Place, patterns: Sequence[str], limit: int = 1 << 20) -> dict[str, str]:
    """Return the files of a folder that patterns such as node-*/status.json match: path below it -> (end of its) text."""
    top, found = path_of(folder), {}
    if top.is_dir():
        for place in [top, *(place for place in top.iterdir() if place.is_dir())]:
            os.listdir(place)  # on NFS this asks the server again; a name alone may be answered from what was
    for path in sorted({path for pattern in patterns for path in top.glob(pattern)}):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
                found[str(path.relative_to(top))] = file.read(limit).decode("utf-8", "replace")
        except OSError:
            continue  # gone since it was listed
    return found


def token(folder: Place) -> str:
    """Return the word by which the nodes of an attempt know each other; made once, readable by this user only."""
    path = path_of(folder) / "token"
    if not path.exists():
        half = path.with_name(f"token.{unique()}")
        half.touch(mode=0o600)
        half.write_text(os.urandom(16).hex())
        try:
            os.link(half, path)
        except FileExistsError:
            pass
        half.unlink()
    return path.read_text()


def unique() -> str:
    """Return the end of a temporary name that no other process or thread makes."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"


def path_of(place: Place) -> Path:
    """Return a place of this machine, written with ~ or not."""
    return place if isinstance(place, Path) else Path(os.path.expanduser(place))
