"""List the installed packages of the ranks' interpreter, by name and version, from its site-packages folders.

Nothing is imported or run for it, and no metadata is read: a package's source, an address that may hold a password, is
not reported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from ..log import Log

MOST = 2000  # packages
LINE = 6000  # characters of names in one event; a marked line has at most 8192 bytes
INFO = re.compile(r"([A-Za-z0-9][\w.-]*?)-(\d[\w.+!]*)(?:-py\d[\d.]*)?\.(?:dist|egg)-info", re.ASCII)


def folders(python: str) -> list[str]:
    """Return the folders from which an interpreter imports packages: this one, or a layer over it (requirements.py)."""
    own = []
    if python != sys.executable:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        own = [os.path.join(os.path.dirname(os.path.dirname(python)), "lib", version, "site-packages")]
    return own + [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]


def packages(folders: list[str]) -> list[str]:
    """Return NAME==VERSION of what is installed in some folders, sorted; the first that has a package wins."""
    versions: dict[str, str] = {}
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in sorted(names):
            if name.endswith("-info") and len(name) < 200 and (match := INFO.fullmatch(name)):
                versions.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2])
    return [f"{name}=={version}" for name, version in sorted(versions.items())][:MOST]


def report(python: str, log: Log) -> None:
    """Emit the packages, in as many events as needed."""
    for part, names in enumerate(_pieces(packages(folders(python)))):
        log.event("requirements", part=part, packages=names)


def _pieces(names: list[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    size = 0
    for name in names:
        size += len(name) + 3
        if size > LINE:
            yield piece
            piece, size = [], len(name) + 3
        piece.append(name)
    yield piece
