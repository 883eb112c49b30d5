"""SSH connections of this process: closed between tests, so that none outlives the machine that it leads to."""

from __future__ import annotations

from cloudtrain.nodes import ssh


def close_all() -> None:
    """Close every connection of this process."""
    remotes = list(ssh._MACHINES.values())
    ssh._MACHINES.clear()
    for remote in remotes:
        remote.close()
