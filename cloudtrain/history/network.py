"""Says whether a folder is on a network file system, where SQLite's WAL does not work."""

from __future__ import annotations

import os
from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
        "afs",
        "fuse.sshfs",
        "fuse.gcsfuse",
        "fuse.s3fs",
    }
)


def on_network(folder: Path) -> bool:
    """Return whether a folder is on a network file system; False where /proc/mounts is missing."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return False
    longest, kind = "", ""
    for line in mounts:
        point, name = line.split(" ", 3)[1:3]
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):
            longest, kind = point, name
    return kind in NETWORK_FILE_SYSTEMS
