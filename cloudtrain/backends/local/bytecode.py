"""Cache the bytecode of the runtime (.cloudtrain in a bundle), so that launcher and ranks do not compile it at every start."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from pathlib import Path

from cloudtrain.source.bundle import runtime_files
from cloudtrain.source.files import RESERVED


def link_bytecode(source: Path, cache: Path) -> None:
    """Link cached bytecode for this interpreter into the runtime of an extracted source; compiles it if necessary.

    Each folder of the runtime gets a `__pycache__` link into the cache. The interpreter checks every file there against
    the hash of its source, so it never uses stale bytecode.
    """
    runtime = source / RESERVED
    files = sorted(runtime.rglob("*.py"))
    try:
        cached = cache / f"{sys.implementation.cache_tag}-{_digest(runtime, files)}"
        if not cached.is_dir():
            _compile(runtime, files, cached)
        for folder in {file.parent for file in files}:
            (folder / "__pycache__").symlink_to(cached / folder.relative_to(runtime))
    except (OSError, ValueError):
        return  # for example a full disk: the job runs without the cache


def _digest(runtime: Path, files: list[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        text = file.read_bytes()
        digest.update(f"\0{file.relative_to(runtime)}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()[:32]


def _compile(runtime: Path, files: list[Path], target: Path) -> None:
    """Fill the cache; raises OSError, and ValueError for a module that this interpreter cannot compile."""
    import shutil
    from py_compile import PycInvalidationMode, PyCompileError, compile

    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    installed = dict(runtime_files())
    try:
        for file in files:
            relative = file.relative_to(runtime)
            compiled = partial / relative.parent / f"{relative.stem}.{sys.implementation.cache_tag}.pyc"
            if known := _installed(file, installed.get(f"{RESERVED}/{relative.as_posix()}")):
                compiled.parent.mkdir(parents=True, exist_ok=True)
                compiled.write_bytes(known)
                continue
            compile(str(file), str(compiled), doraise=True, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        partial.rename(target)
    except PyCompileError as error:
        raise ValueError(error.msg) from None
    except OSError:
        if not target.is_dir():  # otherwise another submit was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _installed(file: Path, installed: Path | None) -> bytes | None:
    """Return the bytecode that pip or an import made of the same file of this installation; None where that is not current.

    Its header has the time and size of the installed file; it becomes the hash of the source (PEP 552).
    """
    from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash

    try:
        if installed is None or (text := file.read_bytes()) != installed.read_bytes():
            return None
        stat, data = installed.stat(), Path(cache_from_source(str(installed))).read_bytes()
    except (OSError, NotImplementedError):
        return None
    made_of = (0, int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF)
    if data[:16] != MAGIC_NUMBER + struct.pack("<3I", *made_of):
        return None
    flags = struct.pack("<I", 0b11)  # checked against the source's hash
    return MAGIC_NUMBER + flags + source_hash(text) + data[16:]
