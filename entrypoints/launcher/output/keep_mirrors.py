"""The copies of a node's kept files: in the run's outputs, and in a second folder where the platform brings that back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..log import Log
from .keep_choice import SMALL, State
from .keep_copy import is_gone, remove, replace

UNKNOWN_STATE: State = (-1, -1)  # of a copy that the outputs may lack
ROOM = 10**9  # bytes that copies leave free on a disk while the ranks run


class Mirrors:
    """Copies files into folders. A file goes from there only when two looks in a row have not found it.

    Attributes:
        folders: the outputs, and the second folder where there is one.
        held: the files that have copies -> the state that was copied, (-1, -1) where the outputs may lack it.
    """

    def __init__(self, folders: Sequence[str], source: str, log: Log) -> None:
        self.folders, self._source, self._log = folders, source, log
        self.held: dict[str, State] = {}
        self._absent: set[str] = set()  # held files that the last look has not found
        self._lacks_room = False

    def copy(self, name: str, may_link: bool, rests: Callable[[], bool], is_last: bool) -> bool:
        """Copy a file, at the end by a link where the disk is full; return whether it rested. Raises OSError."""
        path = os.path.join(self._source, name)
        try:
            return all(replace(path, folder, name, may_link, rests) for folder in self.folders)
        except OSError as error:
            if not is_last or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return all(replace(path, folder, name, True, rests) for folder in self.folders)

    def has_room(self, name: str, size: int, about: str) -> bool:
        """Return whether a copy leaves the ranks enough of the disk of a folder; the one at the end does not ask."""
        status = os.statvfs(about)
        free = status.f_bavail * status.f_frsize
        if size <= SMALL or not status.f_blocks or free - size >= max(size, ROOM):  # a mount may not know its size
            return True
        if not self._lacks_room:
            self._lacks_room = True
            self._log.say(
                f"keep: the disk has too little room for a copy of {name} while the script runs: it is copied at the end, and"
                " an attempt that loses this node starts without it. Raise resources.disk_gb, or write fewer files"
            )
        return False

    def follow(self, present: Mapping[str, object], over: Iterable[str], is_last: bool, is_complete: bool) -> None:
        """Remove what the script has removed, and what is over the limit, unless something present has no copy yet."""
        over = set(over)
        absent = {name for name in self.held if name not in present}
        if is_complete:
            for name in over | (absent if is_last else absent & self._absent):
                if name in over or is_gone(os.path.join(self._source, name)):
                    self.remove([name])
        self._absent = absent

    def remove(self, names: Iterable[str]) -> None:
        """Remove all copies of some files."""
        for name in list(names):
            del self.held[name]
            for folder in self.folders:
                remove(os.path.join(folder, name))
