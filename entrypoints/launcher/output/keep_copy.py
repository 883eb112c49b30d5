"""Copy one kept file, whole and in one step."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from .script_files import PART


def replace(
    path: str, folder: str, name: str, may_link: bool = False, rests: Callable[[], bool] = lambda: True
) -> bool:
    """Make <folder>/<name> a copy of a file, in one step; a folder that stands there, or a file above it, gives way.

    Nothing is replaced, and False returned, where the file has not rested meanwhile.
    """
    import shutil  # only here: it costs every job some milliseconds

    to = os.path.join(folder, name)
    part = os.path.join(os.path.dirname(to), PART)
    for end in (at for at, letter in enumerate(name) if letter == "/"):
        if os.path.isfile(os.path.join(folder, name[:end])):
            os.unlink(os.path.join(folder, name[:end]))
    os.makedirs(os.path.dirname(to), exist_ok=True)
    try:
        if not (may_link and _link(path, part)):
            shutil.copy2(path, part)
        if not rests():
            return False
        if os.path.isdir(to):
            shutil.rmtree(to)
        os.replace(part, to)
        return True
    finally:
        remove(part)


def remove(path: str) -> None:
    """Remove a file, where there is one."""
    try:
        os.unlink(path)
    except OSError:
        pass  # it is gone already


def _link(path: str, to: str) -> bool:
    """Give a file a second name, where both are on one file system that has links."""
    try:
        os.link(path, to, follow_symlinks=True)
    except OSError:
        return False
    return True


def is_inside(name: str) -> bool:
    """Return whether a name of a list lies in the folder that it is of."""
    return not name.startswith("/") and ".." not in name.split("/")


def size_of(path: str) -> int | None:
    """Return a file's size, None where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def is_gone(path: str) -> bool:
    """Return whether no file is there; not where that cannot be told, as in a folder that cannot be read for now."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
