"""Which of this node's checkpoints are whole in the store: what lies below a COMPLETE here, and what it names.

A script's own checkpoint has no such mark. It is reported when the store has all of its files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..log import Log
from .listing import State, list_files, named, state_of
from .store import Store
from .upload_plan import is_mark


class Marks:
    """The COMPLETE files below this node's folders; `stored` is what the store has as it is here, and changes."""

    def __init__(self, store: Store, folders: Mapping[str, str], stored: Mapping[str, State | None], log: Log) -> None:
        self._store, self._folders, self._stored, self._log = store, folders, stored, log
        self._doubtful: set[str] = set()  # marks that name other files than are here
        self._reports: dict[str, dict[str, object]] = {}  # name in the store -> the event of a script's checkpoint

    def report(self, path: str, **data: object) -> None:
        """Report a script's checkpoint, a file or a folder that is whole here, after the next pass that uploads it."""
        top, folder = next((top, at) for top, at in self._folders.items() if path.startswith(at + os.sep))
        self._reports[f"{top}/{os.path.relpath(path, folder)}".replace(os.sep, "/")] = data

    def take_reports(self) -> dict[str, dict[str, object]]:
        """Return the reports that the pass which begins now can send: their files are whole by now."""
        return dict(self._reports)

    def send_reports(self, reports: Mapping[str, dict[str, object]], listed: Mapping[str, State | None]) -> None:
        """Send the reports of checkpoints that the store has as this pass has listed them, and drop those removed here."""
        lists = [name for name in listed if name.startswith("kept/")]  # without them they are not put back
        for unit, data in reports.items():
            names = [name for name in listed if name == unit or name.startswith(f"{unit}/")]
            if any(listed[name] is None or self._stored.get(name) != listed[name] for name in names + lists):
                continue
            self._reports.pop(unit)
            if names:
                self._log.event("checkpoint", **data)

    def is_whole(self, mark: str, path: str) -> bool:
        """Return whether the store has all that lies below a mark here, and all that the mark names; blocking."""
        folder = os.path.dirname(mark)
        below = list_files(self._folders, folder)
        if not all(self._stored.get(name) == state_of(at) for name, at in below.items() if name != mark):
            return False
        files = named(path)
        others = self._store.list(folder) if any(node for _, node in files.values()) else {}
        sizes = {
            name: others.get(name) if node else self._stored.get(f"{folder}/{name}")
            for name, (_, node) in files.items()
        }
        return all((sizes[name] or (-1,))[0] == size for name, (size, _) in files.items())

    def is_doubtful(self, mark: str, path: str) -> bool:
        """Return whether a mark here names what is not here, and log it once: it is not uploaded."""
        folder = os.path.dirname(path)
        for name, (size, node) in named(path).items():
            state = state_of(os.path.join(folder, name))
            if not node and (state is None or state[0] != size) and os.path.exists(path):  # else it is being removed
                if mark not in self._doubtful:
                    why = f"the size of {name} differs from the one in its list of files"
                    self._log.say(f"output: {mark} is not uploaded yet: {why}")
                self._doubtful.add(mark)
                return True
        self._doubtful.discard(mark)
        return False

    def may_retire(self, succeeded: bool) -> bool:
        """Return whether the store has every checkpoint that is whole here, and there is one, or none is needed."""
        marks = self._certain()
        return (bool(marks) or succeeded) and all(self._stored.get(name) == state_of(at) for name, at in marks.items())

    def waiting(self) -> str:
        """Return a mark that waits for parts of other nodes, "" for none."""
        marks = self._certain().items()
        waiting = (
            name for name, path in marks if name not in self._stored and any(node for _, node in named(path).values())
        )
        return next(waiting, "")

    def _certain(self) -> dict[str, str]:
        listed = list_files(self._folders, "checkpoints").items()
        return {name: path for name, path in listed if is_mark(name) and name not in self._doubtful}
