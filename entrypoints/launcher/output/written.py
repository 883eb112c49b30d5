"""Detect checkpoints of scripts that report none, by the files in the folders where they can lie."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence

from .keep_choice import group
from .script_files import checkpoint_of, is_saved_state, is_whole

# The shared trainer reports its checkpoints itself: an unfinished folder is no checkpoint.
OURS = re.compile(r"step-\d+\.a\d+|epochs|checkpoint_dir|\..*")

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any


class NewCheckpoints:
    """Compares folders with their content at the ranks' start.

    Args:
        folders: those of checkpoints, in which any file is a part of one.
        others: placeholder -> folder, in which what is named as a checkpoint is one.
        is_ours: whether a file of {output_dir} is a copy of one that the script wrote elsewhere.
    """

    def __init__(
        self,
        folders: Sequence[str],
        others: Mapping[str, str] | None = None,
        is_ours: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._folders, self._others, self._is_ours = folders, others or {}, is_ours
        self._before = self._state()
        self._reported: set[str] = set()

    def look(self) -> dict[str, Any]:
        """Return the newest that was written since and is whole, as data of an event; empty where it was reported."""
        now = self._state()
        new = {name: at for name, at in now.items() if at > self._before.get(name, -1)}
        name = max(new, key=lambda each: new[each], default="")
        if not name or name in self._reported:
            return {}
        self._reported.add(name)
        is_named = checkpoint_of(f"{name}/") or is_saved_state(name)
        return {"kept" if name.startswith("{") else "written": name, **(step_of(name) if is_named else {})}

    def path_of(self, found: Mapping[str, Any]) -> str:
        """Return the path of what `look` returned."""
        title, _, unit = str(found.get("kept", "")).partition("/")
        if unit:
            return os.path.join(self._others[title], unit)
        paths = [os.path.join(folder, found["written"]) for folder in self._folders]
        return next(filter(os.path.exists, paths), paths[0])

    def _state(self) -> dict[str, int]:
        """Return when the newest file was written, by name of what lies in the folders; ns. Empty folders do not count."""
        newest: dict[str, int] = {}
        for folder in self._folders:
            found = _times(folder)
            tops: dict[str, list[str]] = {}
            for name in found:
                tops.setdefault(name.partition("/")[0], []).append(name)
            for top, names in tops.items():
                if not OURS.fullmatch(top) and (names == [top] or is_whole(top, names, found) is not False):
                    newest[top] = max(newest.get(top, 0), *(found[name] for name in names))
        for title, folder in self._others.items():
            found = {name: at for name, at in _times(folder).items() if not self._is_ours(name)}
            for unit, names in group(found).items():
                if is_saved_state(unit) if unit in found else is_whole(unit, names, found) is not False:
                    newest[f"{title}/{unit}"] = max(found[name] for name in names)
        return newest


def step_of(name: str) -> dict[str, int]:
    """Return the step in the name of a checkpoint, as data of an event; empty where it has none."""
    step = re.search(r"(?<!\d)(\d{1,18})(?:\.\w+)?\Z", name)
    return {"step": int(step[1])} if step else {}


def _times(folder: str) -> dict[str, int]:
    """Return when the files below a folder were written, by their relative names; ns."""
    times: dict[str, int] = {}
    for at, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(at, name)
            try:
                times[os.path.relpath(path, folder).replace(os.sep, "/")] = os.stat(path).st_mtime_ns
            except OSError:  # it was removed a moment ago
                continue
    return times
