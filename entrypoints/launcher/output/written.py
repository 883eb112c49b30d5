"""Detect checkpoints of scripts that report none, by the files in the checkpoint folder."""

from __future__ import annotations

import os
import re

# The shared trainer reports its checkpoints itself: an unfinished folder is no checkpoint.
OURS = re.compile(r"step-\d+\.a\d+|epochs|\..*")


class NewCheckpoints:
    """Compares the checkpoint folder with its content at the ranks' start."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before = self._state()
        self._reported = False

    def look(self) -> str:
        """Return the name of what was written since, once in an attempt; "" when there is nothing, or it was reported."""
        if self._reported:
            return ""
        for name, at in sorted(self._state().items()):
            if at > self._before.get(name, -1):
                self._reported = True
                return name
        return ""

    def _state(self) -> dict[str, int]:
        """Return when the newest file was written, by name of what lies in the folder; ns. Empty folders do not count."""
        newest: dict[str, int] = {}
        for at, folders, names in os.walk(self._folder):
            if at == self._folder:
                folders[:] = [name for name in folders if not OURS.fullmatch(name)]
                names = [name for name in names if not OURS.fullmatch(name)]
            for name in names:
                path = os.path.join(at, name)
                try:
                    written = os.stat(path).st_mtime_ns
                except OSError:  # it was removed a moment ago
                    continue
                top = os.path.relpath(path, self._folder).split(os.sep)[0]
                newest[top] = max(newest.get(top, 0), written)
        return newest
