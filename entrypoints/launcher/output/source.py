"""Pack the source of a job for its output, so that whoever attaches to the run can resume it."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Mapping

FOLDER = "source"  # <output>/<run>/source/<digest of the source's files>.tar.gz
MOST = 256 << 20  # bytes of all files
RUNTIME = ".cloudtrain"  # our own files, which the next attempt brings itself

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any


def name_of(about: Mapping[str, Any]) -> str:
    """Return the name of a job's source in its output; "" where it holds files that its owner let pass the secret guard."""
    digest = (about.get("bundle") or {}).get("source_sha256")
    allowed = (about.get("job") or {}).get("allow_secrets")
    return f"{FOLDER}/{digest}.tar.gz" if digest and not allowed else ""


def pack(folder: str) -> bytes:
    """Return the files of a source, before a rank has written there; empty where they have more than MOST bytes. Raises
    OSError."""
    names = []
    for at, folders, files in os.walk(folder):
        inner = os.path.relpath(at, folder)
        folders[:] = [name for name in folders if name != "__pycache__" and (inner, name) != (".", RUNTIME)]
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        names += [os.path.normpath(os.path.join(inner, name)) for name in (*files, *links)]
    if sum(os.lstat(os.path.join(folder, name)).st_size for name in names) > MOST:
        return b""
    stream = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=1) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(names):
            archive.add(os.path.join(folder, name), name, recursive=False)
    return stream.getvalue()
