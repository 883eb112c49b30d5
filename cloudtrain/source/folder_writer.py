"""Write what others wrote below a folder of this machine: fetched files, copied folders, unpacked archives.

The writer itself is entrypoints/launcher/folder_writer.py, which nodes use for the inputs of a job.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloudtrain.errors import BackendError, DiskError
from cloudtrain.source import untrusted
from cloudtrain.source.node_code import module

PIECE_BYTES = 1 << 20


def copy_tree(source: Path, into: Path, leave_out: Collection[str] = (), named: Callable[[str], str] = str) -> None:
    """Copy a folder of this machine, but for some names in it; no file has its name before it is complete. Blocking.

    Files with the same size and time are skipped, and so are those that disappear while it copies, such as old checkpoints.
    Links that lead out of the folder, pipes and the like are left out with a warning. `named` gives other names, "" to what
    is left out. Raises DiskError.
    """

    def report(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or not source.is_dir():
            raise error

    with folder_writer(into) as writer:
        for at, folders, names in os.walk(source, onerror=report):
            inner = os.path.relpath(at, source)
            if inner == ".":
                folders[:], names = ([name for name in some if name not in leave_out] for some in (folders, names))
            for base in (*folders, *names):
                name = base if inner == "." else f"{inner}/{base}"
                if to := named(name):
                    with writing(into / to):
                        _copy(source, name, to, writer)


def _copy(source: Path, name: str, to: str, writer: Any) -> None:
    try:
        about = (source / name).lstat()
        target = _relative(source, name) if stat.S_ISLNK(about.st_mode) else ""
        is_new = stat.S_ISREG(about.st_mode) and not writer.has(to, about.st_size, about.st_mtime_ns)
        descriptor = untrusted.open_file(source, name) if is_new else None
    except FileNotFoundError:
        return  # it was removed after it was listed, such as an old checkpoint
    if target:
        writer.link(to, target)
    elif stat.S_ISDIR(about.st_mode):
        writer.folder(to)
    elif descriptor is not None:
        with open(descriptor, "rb") as file, writer.write(to, about.st_mode, about.st_mtime_ns) as copy:
            left = about.st_size  # it may grow for ever
            while piece := file.read(min(left, PIECE_BYTES)):
                copy.write(piece)
                left -= len(piece)
    elif not stat.S_ISREG(about.st_mode):
        writer.left_out.append(to)


def _relative(source: Path, name: str) -> str:
    """Return where a link leads: an absolute path below the source relative to the link, any other as it is."""
    link = source / name
    target = os.readlink(link)  # noqa: PTH115 - Path would normalise it
    for top in (os.path.abspath(source), os.path.realpath(source)):  # noqa: PTH100
        if target.startswith(f"{top}/"):
            return os.path.relpath(target, f"{top}/{os.path.dirname(name)}")  # noqa: PTH120
    return target


@contextmanager
def folder_writer(into: Path) -> Iterator[Any]:
    """Yield what writes below a folder and never outside, whatever others wrote (entrypoints/launcher/folder_writer.py).

    Links that lead out of the folder are left out with a warning. Raises BackendError for names that do; DiskError.
    """
    code = module("launcher.folder_writer")
    try:
        with writing(into), code.FolderWriter(into) as writer:
            yield writer
    except code.Unsafe as error:
        raise BackendError(f"{into} does not get all files: {error}") from None
    if names := writer.left_out:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        text = "%s: special files and links that point outside are not copied: %s%s"
        logging.getLogger(__name__).warning(text, into, ", ".join(map(repr, names[:3])), more)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskError that names the path where the block cannot write."""
    try:
        yield
    except OSError as error:
        raise DiskError(path, error) from None
