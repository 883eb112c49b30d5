"""Which files differ between two stored packages of a source; nothing is unpacked."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from typing import IO

from cloudtrain.errors import StoreError
from cloudtrain.source.bundle import Bundle


def find(first: Bundle, second: Bundle) -> dict[str, str]:
    """Return the paths of the user's files that differ, with `added`, `removed` or `changed`, sorted; blocking, reads both.

    A file differs by its bytes or its mode, a link by its target. Raises StoreError where a package cannot be read.
    """
    old, new = _contents(first), _contents(second)
    found = dict.fromkeys(old.keys() - new.keys(), "removed") | dict.fromkeys(new.keys() - old.keys(), "added")
    found |= {path: "changed" for path in old.keys() & new.keys() if old[path] != new[path]}
    return dict(sorted(found.items()))


def _contents(bundle: Bundle) -> dict[str, tuple[bytes, int, str]]:
    """Return what decides whether each of the user's files is the same: type, mode, and digest or target."""
    mine = {file.path for file in bundle.files}
    try:
        with tarfile.open(bundle.path, "r:gz") as archive:
            return {
                one.name: (one.type, one.mode, one.linkname or _digest(archive.extractfile(one)))
                for one in archive
                if one.name in mine
            }
    except (OSError, EOFError, KeyError, tarfile.TarError, zlib.error) as error:
        raise StoreError(
            f"{bundle.path} is damaged: {error}", "delete this file; the next submit of its source creates it again"
        ) from None


def _digest(file: IO[bytes] | None) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest() if file else ""  # type: ignore[arg-type]
