"""Which packages the ranks' interpreter has: names and versions, as its site-packages folders name them.

Nothing is imported or run for it, and no metadata is read: where a package came from, which an address with a password may
say, is not told.
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
    return own + [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]


def packages(places: list[str]) -> list[str]:
    """Return NAME==VERSION of what is installed in some folders, sorted; the first that has a package wins."""
    found: dict[str, str] = {}
    for place in places:
        try:
            names = os.listdir(place)
        except OSError:
            continue
        for name in sorted(names):
            if (known := INFO.fullmatch(name)) and len(name) < 200:
                found.setdefault(re.sub(r"[-_.]+", "-", known[1]).lower(), known[2])
    return [f"{name}=={version}" for name, version in sorted(found.items())][:MOST]


def report(python: str, log: Log) -> None:
    """Tell of them, in as many events as it takes."""
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
