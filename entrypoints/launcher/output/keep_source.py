"""Remember what the source's files were when the ranks began: a source that has changed since wins over kept files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping

from .keep_choice import SMALL
from .script_files import files, is_result

Summary = tuple  # size, and a checksum; 0 where it was not computed
UNKNOWN = (-1, 0)  # the ranks had changed it already
MOST = 100_000  # files that are looked at
MOST_BYTES = 256 << 20  # that are read of all files


def survey(source: str, began_ns: int, is_over: Callable[[], bool]) -> dict[str, Summary] | None:
    """Return the files of a working directory as they were before the ranks began; None where that cannot be told."""
    found: dict[str, Summary] = {}
    rest = MOST_BYTES
    for name in filter(is_result, files(source, [""])):
        if is_over() or len(found) >= MOST:
            return None
        path = os.path.join(source, name)
        try:
            summary = summarize(path, rest)
            rest -= summary[0] if summary[1] else 0
            found[name] = summary if os.stat(path).st_ctime_ns < began_ns else UNKNOWN
        except OSError:
            found[name] = UNKNOWN
    return found


def summarize(path: str, most: int = SMALL) -> Summary:
    """Return a file's size and, of a small one, its checksum. Raises OSError."""
    size = os.stat(path).st_size
    if size > min(SMALL, most):
        return size, 0
    with open(path, "rb") as file:
        return size, zlib.crc32(file.read(SMALL))


def has_changed(source: str, name: str, before: Mapping[str, Summary] | None) -> bool:
    """Return whether the source has a file that it did not have, or had otherwise, when the script wrote the kept one."""
    path = os.path.join(source, name)
    above = (os.path.join(source, name[:at]) for at, letter in enumerate(name) if letter == "/")
    if os.path.isdir(path) or any(map(os.path.isfile, above)):
        return True  # it cannot stand beside the source's files
    if before is None or before.get(name) == UNKNOWN or not os.path.isfile(path):
        return False
    try:
        size, checksum = summarize(path)
    except OSError:
        return False
    old_size, old_checksum = before.get(name, UNKNOWN)
    return bool(size != old_size or (old_checksum and checksum != old_checksum))
