"""Detect checkpoints of scripts that report none, by the files in the folders where they can lie."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

# The shared trainer reports its checkpoints itself: an unfinished folder is no checkpoint.
OURS = re.compile(r"step-\d+\.a\d+|epochs|checkpoint_dir|\..*")


class NewCheckpoints:
    """Compares the checkpoint folders with their content at the ranks' start."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders
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
        for folder in self._folders:
            for at, folders, names in os.walk(folder):
                if at == folder:
                    folders[:] = [name for name in folders if not OURS.fullmatch(name)]
                    names = [name for name in names if not OURS.fullmatch(name)]
                for name in names:
                    path = os.path.join(at, name)
                    try:
                        written = os.stat(path).st_mtime_ns
                    except OSError:  # it was removed a moment ago
                        continue
                    top = os.path.relpath(path, folder).split(os.sep)[0]
                    newest[top] = max(newest.get(top, 0), written)
        return newest
