"""Choose which of a script's files are whole, and which of them are kept within the limit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from .script_files import checkpoint_of, is_saved_state, is_whole
from .script_files import open_for_writing as find_writers

State = tuple[int, int]  # a file's size and time of change
LIMIT = 20 * 10**9  # bytes that `keep: auto` keeps of a node
SMALL = 1 << 20  # a file below it is kept, whatever else is over the limit
STILL = 4  # looks for which a checkpoint of an unknown kind has not changed when it counts as whole
RESTLESS = 1 << 30  # bytes of a saved state that is copied although each look finds it changed, at every fourth one


class Choice:
    """Compares each look at a working directory with the one before."""

    def __init__(self, source: str, limit: int) -> None:
        self._source, self._limit = source, limit
        self._resting: dict[str, tuple[object, int]] = {}  # a file's or checkpoint's state, and looks that found it so
        self._waits: dict[str, int] = {}  # looks for which a file has changed since it was copied
        self.restless: set[str] = set()  # files that the last choice took although they change
        self.over: dict[str, int] = {}  # files and checkpoints that the limit leaves out -> size

    def choose(self, present: Mapping[str, os.stat_result], mirrored: Mapping[str, State], is_last: bool) -> list[str]:
        """Return the files that are whole and within the limit: complete checkpoints first, the newest before the others."""
        units, ready, writers = group(present), {}, None
        self.restless = set()
        resting, self._resting = self._resting, {}
        for unit, names in units.items():
            state = [(name, state_of(present[name])) for name in names]
            before, looks = resting.get(unit, (None, 0))
            self._resting[unit] = state, looks + 1 if before == state else 0
            whole = unit in present or is_whole(unit, names, present)
            rests = self._resting[unit][1] >= (1 if whole else STILL) and whole is not False
            restless = not rests and unit in present and self._has_waited(unit, present[unit].st_size)
            if is_last or all(mirrored.get(name) == at for name, at in state):
                ready[unit] = whole
                self._waits.pop(unit, None)
            elif rests or restless:
                writers = find_writers(self._source) if writers is None else writers
                if not writers.intersection(names):
                    ready[unit] = whole
                    self._waits.pop(unit, None)
                    if restless:
                        self.restless.add(unit)
        kept = {name: unit for unit, names in units.items() for name in names if unit in ready or name in mirrored}
        sizes: dict[str, int] = {}
        for name, unit in kept.items():
            sizes[unit] = sizes.get(unit, 0) + present[name].st_size
        newest = {unit: max(present[name].st_mtime_ns for name in units[unit]) for unit in sizes}
        self.over = self._find_over(sizes, newest)
        order = sorted(ready, key=lambda unit: (unit in present or not ready[unit], -newest[unit]))
        return [name for unit in order if unit not in self.over for name in units[unit]]

    def _has_waited(self, name: str, size: int) -> bool:
        """Count a look that found a file changed; return whether it is to be copied all the same.

        A loop that saves its state more often than two looks can see would lose all of it with the machine.
        """
        self._waits[name] = self._waits.get(name, -1) + 1
        return self._waits[name] >= STILL - 1 and size <= (RESTLESS if is_saved_state(name) else SMALL)

    def _find_over(self, sizes: Mapping[str, int], newest: Mapping[str, int]) -> dict[str, int]:
        """Return what the limit leaves out: small files have a tenth of it before the others, then the newest come first.

        A data set of small files that the script unpacks leaves no checkpoint out.
        """
        over: dict[str, int] = {}
        ordered, total, first = sorted(sizes, key=lambda unit: -newest[unit]), 0, set()
        for unit in ordered:
            if sizes[unit] <= SMALL and total + sizes[unit] <= self._limit // 10:
                first.add(unit)
                total += sizes[unit]
        for unit in ordered:
            if unit not in first and total + sizes[unit] > self._limit:
                over[unit] = sizes[unit]
            elif unit not in first:
                total += sizes[unit]
        return over


def group(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each checkpoint by its folder, and each other file by its own name."""
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(checkpoint_of(name) or name, []).append(name)
    return units


def state_of(status: os.stat_result) -> State:
    return status.st_size, status.st_mtime_ns
