"""Bytecode of the runtime, compiled once on this machine instead of at every start of a launcher and of its ranks."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from cloudtrain.source.files import RESERVED


def lend(source: Path, cache: Path) -> None:
    """Let the runtime in an extracted source find its bytecode, made for this very interpreter; blocking, a moment.

    Each folder of the runtime gets a `__pycache__` that leads into the cache. The interpreter holds every file there
    against the hash of its source, so that a wrong one is not used; without one it compiles, as it does elsewhere.
    """
    runtime = source / RESERVED
    files = sorted(runtime.rglob("*.py"))
    try:
        place = cache / f"{sys.implementation.cache_tag}-{_digest(runtime, files)}"
        if not place.is_dir():
            _compile(runtime, files, place)
        for folder in {file.parent for file in files}:
            (folder / "__pycache__").symlink_to(place / folder.relative_to(runtime))
    except (OSError, ValueError):
        return  # a full disk, say: the job needs none of this


def _digest(runtime: Path, files: list[Path]) -> str:
    whole = hashlib.sha256(sys.version.encode())
    for file in files:
        text = file.read_bytes()
        whole.update(f"\0{file.relative_to(runtime)}\0{len(text)}\0".encode())
        whole.update(text)
    return whole.hexdigest()[:32]


def _compile(runtime: Path, files: list[Path], place: Path) -> None:
    """Fill the cache; raises OSError, and ValueError for a module that this interpreter cannot compile."""
    import shutil
    from py_compile import PycInvalidationMode, PyCompileError, compile

    half = place.with_name(f"{place.name}.{os.getpid()}.tmp")
    try:
        for file in files:
            inner = file.relative_to(runtime)
            compiled = half / inner.parent / f"{inner.stem}.{sys.implementation.cache_tag}.pyc"
            compile(str(file), str(compiled), doraise=True, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        half.rename(place)
    except PyCompileError as error:
        raise ValueError(error.msg) from None
    except OSError:
        if not place.is_dir():  # otherwise another submit was faster
            raise
    finally:
        shutil.rmtree(half, ignore_errors=True)
