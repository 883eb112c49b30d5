"""Open, read and list untrusted files: below a folder no link is followed, no pipe or device is opened, all is bounded.

Whoever may write there can change a name at any moment. So each folder is opened in the one above it, and what was
opened is checked, not what was listed. Sent to nodes as text, like nodes/agent.py.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_ENTRIES = 500_000  # of one listing, folders included
MOST_DEPTH = 100  # of folders in folders
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def open_folder(root: str | Path, below: str = "") -> int:
    """Return the descriptor of a folder below a root. Links on the way to the root are followed. Raises OSError."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in _parts(below) if below else ():
        descriptor = _open_in(descriptor, part, stat.S_IFDIR)
    return descriptor


def open_file(root: str | Path, name: str) -> int:
    """Return the descriptor of a regular file below a root; raises OSError, whose strerror says what else is there."""
    folder, _, last = name.rpartition("/")
    _parts(name)
    return _open_in(open_folder(root, folder), last, stat.S_IFREG)


def read_file(root: str | Path, name: str, most: int, offset: int = 0) -> bytes:
    """Return at most `most` bytes of a regular file below a root, from an offset. Raises OSError."""
    with open(open_file(root, name), "rb", buffering=0) as file:
        file.seek(offset)
        found = bytearray()
        while piece := file.read(min(most - len(found), 1 << 20)):
            found += piece
        return bytes(found)


def walk(root: str | Path, below: str = "", most: int = MOST_ENTRIES) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what is below a folder but for folders: its name below that folder, and what lstat says. Unsorted.

    Of what disappears meanwhile, or may not be listed, nothing is yielded. Raises OSError where the folder itself is none,
    and for more entries or deeper folders than the bounds.
    """
    folders, count = [""], 0
    while folders:
        inner = folders.pop()
        try:
            descriptor = open_folder(root, "/".join(filter(None, (below, inner))))
        except OSError as error:
            if not inner and not isinstance(error, FileNotFoundError):
                raise
            continue
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    count += 1
                    name = f"{inner}/{entry.name}" if inner else entry.name
                    if count > most or name.count("/") > MOST_DEPTH:
                        bound = f"more than {most:,} entries" if count > most else f"folders deeper than {MOST_DEPTH}"
                        raise OSError(errno.E2BIG, f"there are {bound}", below)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(name)
                    elif about := _about(entry):
                        yield name, about
        finally:
            os.close(descriptor)


def _about(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None  # it has gone since it was listed


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
        raise OSError(errno.EINVAL, "the name leads out of the folder", name)
    return parts


def _open_in(folder: int, name: str, wanted: int) -> int:
    """Open a name in a folder, and close the folder."""
    try:
        _check(os.stat(name, dir_fd=folder, follow_symlinks=False), name, wanted)  # opening some devices has effects
        descriptor = os.open(name, _OPEN, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        _check(os.fstat(descriptor), name, wanted)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(about: os.stat_result, name: str, wanted: int) -> None:
    kind = stat.S_IFMT(about.st_mode)
    if kind == wanted:
        return
    code = errno.ENOTDIR if wanted == stat.S_IFDIR else errno.EISDIR if kind == stat.S_IFDIR else errno.ENXIO
    expected = "a folder" if wanted == stat.S_IFDIR else "a regular file"
    raise OSError(code, f"{name} is {_KINDS.get(kind, 'something else')}, not {expected}", name)
