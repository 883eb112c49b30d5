"""Copy one kept file, whole and in one step."""

from __future__ import annotations

import os

from .script_files import PART


def replace(path: str, folder: str, name: str, may_link: bool = False) -> None:
    """Make <folder>/<name> a copy of a file, in one step; a folder that stands there, or a file above it, gives way."""
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
        if os.path.isdir(to):
            shutil.rmtree(to)
        os.replace(part, to)
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
