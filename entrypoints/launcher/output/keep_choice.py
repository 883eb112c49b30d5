"""Choose which of a script's files are whole, and which of them are kept within the limit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from .script_files import checkpoint_of, is_whole
from .script_files import open_for_writing as find_writers

LIMIT = 20 * 10**9  # bytes that `keep: auto` keeps of a node
SMALL = 1 << 20  # a file below it is kept, whatever else is over the limit
STILL = 4  # looks for which a checkpoint of an unknown kind has not changed when it counts as whole


class Choice:
    """Compares each look at a working directory with the one before."""

    def __init__(self, source: str, limit: int) -> None:
        self._source, self._limit = source, limit
        self._resting: dict[str, tuple[object, int]] = {}  # a file's or checkpoint's state, and looks that found it so
        self.over: dict[str, int] = {}  # files and checkpoints that the limit leaves out -> size

    def choose(
        self, present: Mapping[str, os.stat_result], mirrored: Mapping[str, tuple[int, int]], is_last: bool
    ) -> list[str]:
        """Return the files that are whole and within the limit: complete checkpoints first, the newest before the others."""
        units, ready, writers = group(present), {}, None
        resting, self._resting = self._resting, {}
        for unit, names in units.items():
            state = [(name, state_of(present[name])) for name in names]
            before, looks = resting.get(unit, (None, 0))
            self._resting[unit] = state, looks + 1 if before == state else 0
            whole = unit in present or is_whole(unit, names, present)
            rests = self._resting[unit][1] >= (1 if whole else STILL) and whole is not False
            if is_last or all(mirrored.get(name) == at for name, at in state):
                ready[unit] = whole
            elif rests:
                writers = find_writers(self._source) if writers is None else writers
                if not writers.intersection(names):
                    ready[unit] = whole
        kept = {name: unit for unit, names in units.items() for name in names if unit in ready or name in mirrored}
        sizes: dict[str, int] = {}
        for name, unit in kept.items():
            sizes[unit] = sizes.get(unit, 0) + present[name].st_size
        newest = {unit: max(present[name].st_mtime_ns for name in units[unit]) for unit in sizes}
        total, self.over = 0, {}
        for unit in sorted(sizes, key=lambda unit: (sizes[unit] > SMALL, -newest[unit])):
            if total + sizes[unit] > self._limit:
                self.over[unit] = sizes[unit]
            else:
                total += sizes[unit]
        order = sorted(ready, key=lambda unit: (unit in present or not ready[unit], -newest[unit]))
        return [name for unit in order if unit not in self.over for name in units[unit]]


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each checkpoint by its folder, and each other file by its own name."""
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(checkpoint_of(name) or name, []).append(name)
    return units


def state_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
