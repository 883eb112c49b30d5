"""A machine's bundles: store the pieces of an upload, unpack. Sent to nodes as text, like agent.py.

What lies on a machine:

    <root>/src/<sha256>.tar.gz     a bundle, by the digest of its tar
    <root>/src/.<sha256>.<size>    what has arrived of it: the next upload continues there
    <root>/src/.<sha256>.bytecode  of our own files in it
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from cloudtrain.nodes.files import AnyPath, expand_path, make_folders, restrict

MADE_AT = 315532800  # 1980-01-01, the first year of a zip file


def _paths(root: AnyPath, sha256: str, size: int) -> tuple[Path, Path]:
    folder = expand_path(root) / "src"
    return folder / f"{sha256}.tar.gz", folder / f".{sha256}.{size}"


def arrived(root: AnyPath, sha256: str, size: int) -> int:
    """Return how many bytes of a bundle of `size` bytes are here; less than `size` where it is not complete."""
    bundle, partial = _paths(root, sha256, size)
    if bundle.exists():
        return size
    try:
        return max(min(partial.stat().st_size, size - 1), 0)
    except FileNotFoundError:
        return 0


def store_piece(root: AnyPath, sha256: str, offset: int, size: int, given: bytes = b"") -> None:
    """Write a piece of a bundle of `size` bytes; the last one moves it to its digest's name.

    Several uploads may run at once: they write the same bytes. Raises OSError if the disk is full.
    """
    bundle, partial = _paths(root, sha256, size)
    make_folders(bundle.parent)
    if bundle.exists():
        return  # another upload was first
    try:
        with open(os.open(partial, os.O_WRONLY | (0 if offset else os.O_CREAT), 0o600), "wb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(file.fileno()), partial.stat()) or offset > file.seek(0, os.SEEK_END):
                raise FileNotFoundError(errno.ENOENT, "what had arrived of the bundle is gone")
            file.seek(offset)
            file.write(given)
            file.flush()
            if offset + len(given) >= size:
                partial.replace(bundle)
    except FileNotFoundError:
        if not bundle.exists():  # another upload was first
            raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def extract_bundle(root: AnyPath, sha256: str, into: AnyPath, mode: int = 0o700) -> None:
    """Unpack an uploaded bundle into a folder, all or nothing; does nothing if the folder exists.

    `mode` is that of its folders, and its files have no more.

    Raises ValueError, and deletes the bundle, if its digest is wrong; OSError if the disk is full.
    """
    import hashlib

    from cloudtrain.errors import StoreError
    from cloudtrain.source import archive  # here: most operations do not need it

    into, bundle = expand_path(into), expand_path(root) / "src" / f"{sha256}.tar.gz"
    if into.exists():
        return
    partial = into.with_name(f".{into.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    make_folders(partial, mode)
    try:
        digest = hashlib.sha256()
        try:
            with open(bundle, "rb", buffering=0) as stream:
                archive.extract(stream, partial, digest.update)
            intact = digest.hexdigest() == sha256
        except StoreError:
            intact = False
        if not intact:
            bundle.unlink()
            raise ValueError("what arrived is not the bundle that was sent")
        restrict(partial, mode)
        _share_bytecode(partial, bundle.with_name(f".{sha256}.bytecode"), mode)
        try:
            partial.rename(into)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _share_bytecode(source: Path, cache: Path, mode: int) -> None:
    """Let all attempts of a bundle use the bytecode of our own files, which the first of their processes writes.

    The files get one time: Python compares it and the size with those in the bytecode.
    """
    runtime = source / ".cloudtrain"
    for file in runtime.rglob("*.py"):
        os.utime(file, (MADE_AT, MADE_AT))
        link = file.with_name("__pycache__")
        if not link.is_symlink():
            kept = cache / file.parent.relative_to(runtime)
            make_folders(kept, mode)
            link.symlink_to(kept)
