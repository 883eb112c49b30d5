"""A control group (v2, else v1's freezer) that holds every process of a node, whatever its session and environment.

Its path stands in the node's folder, where a client finds what is left when guard and supervisor were killed together
(cloudtrain.nodes.supervisor.kill_leftovers).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from . import processes

FILE = "cgroup"  # in the node's folder


def enter(folder: str) -> bool:
    """Move this process into a new group below its own; False where it may not, or there are no groups."""
    for parent in _own_groups():
        group = os.path.join(parent, f"cloudtrain-{os.getpid()}-{processes.start_ticks(os.getpid())}")
        try:
            os.mkdir(group)
        except OSError:  # no rights, or not mounted here
            continue
        try:
            _move(group)
            with open(os.path.join(folder, FILE), "w") as file:
                file.write(group)
            return True
        except OSError:
            _remove(group)
    return False


def leave(folder: str) -> None:
    """Remove the group that `enter` made, if any; all of its other processes have ended."""
    try:
        with open(os.path.join(folder, FILE)) as file:
            _remove(file.read())  # the file stays: who deletes the folder now meets nothing that vanishes
    except OSError:
        pass  # there is none


def _remove(group: str) -> None:
    for act, place in ((_move, os.path.dirname(group)), (os.rmdir, group)):
        try:
            act(place)
        except OSError:
            pass  # what is left in it is found by a client


def _move(group: str) -> None:
    """Move this process; raises OSError. The file is never created: a folder that hides a group has none."""
    with open(os.path.join(group, "cgroup.procs"), "r+") as file:
        file.write(str(os.getpid()))


def _own_groups() -> Iterator[str]:
    """Yield the folders of this process's groups in which others can be made, v2 first."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return
    for kind, controller in (("cgroup2", ""), ("cgroup", "freezer")):
        own = next((path for _, names, path in lines if controller in names.split(",")), "")
        for mount in mounts:
            about = mount[mount.index("-") + 1 :]
            if about[0] == kind and (not controller or controller in about[2].split(",")):
                below = os.path.relpath(own, mount[3])
                if own and not below.startswith(".."):
                    yield os.path.normpath(os.path.join(mount[4], below))
