"""Bring the kept files of earlier starts back into the working directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..log import Log
from . import keep_list
from .keep_choice import State, group, state_of
from .keep_copy import replace, size_of
from .keep_mirrors import UNKNOWN_STATE, Mirrors
from .keep_report import SHOWN
from .keep_source import Summary, has_changed
from .script_files import checkpoint_of, files, is_result, is_whole

NODE = r"node-[1-9]\d*/"  # begins the name of another node's file below outputs/


def linkable(names: Mapping[str, object]) -> set[str]:
    """Return the checkpoints whose files can share their content with copies: no script writes to a complete one."""
    return {unit for unit, inner in group(names).items() if unit not in names and is_whole(unit, inner, names)}


class Restore:
    """What earlier starts of a node left, and what of it is in the working directory now.

    Attributes:
        borrowed: the first node's files, as they were given to this one -> their states.
        recorded: the list of kept files -> sizes.
        before: what they were in the source, where it had them; None where that is not known.
        is_first: no earlier start has left anything here.
        checkpoints: those that were brought back, and other files.
    """

    def __init__(
        self,
        mirrors: Mirrors,
        source: str,
        first_outputs: str,
        records: str,
        rank: int,
        log: Log,
        mark: str,
        patterns: tuple[Sequence[str], Callable[[str], bool]] | None,  # None with `keep: auto`; roots, and what is kept
    ) -> None:
        self._mirrors, self._source, self._first_outputs, self._records = mirrors, source, first_outputs, records
        self._rank, self._log, self._mark, self._patterns = rank, log, mark, patterns
        self._newer: set[str] = set()  # files of the source that replace kept ones
        self._is_fresh = True  # no rank has run in this copy of the source
        self.borrowed: dict[str, State] = {}
        self.recorded: dict[str, int] = {}
        self.before: dict[str, Summary] | None = None
        self.is_first = True
        self.checkpoints: set[str] = set()

    def note_first(self) -> None:
        """Take note of the first node's files, where all nodes share the working directory and it restores them."""
        names = self._names_in(self._first_outputs, keep_list.read(self._records, 0)[0])
        self.borrowed = {name: UNKNOWN_STATE for name in names if self._patterns is None or not re.match(NODE, name)}
        self.is_first = not os.path.exists(self._mark) and not self.borrowed

    def run(self) -> int:
        """Copy the files and return how many; blocking.

        Where no rank has run in this copy of the source yet, a file of the source that they changed is replaced, unless the
        source has another one by now. What only the first node wrote comes to the others too, where they see its outputs:
        rank 0 alone saves in most scripts.
        """
        self._is_fresh, count = not os.path.exists(self._mark), 0
        self.recorded, self.before = keep_list.read(self._records, self._rank)
        held, complete = self._mirrors.held, linkable(self.recorded) if self._patterns is None else set()
        outputs = self._mirrors.folders[0]
        for mirror in self._mirrors.folders:
            for name in self._names_in(mirror, self.recorded):
                if self._patterns is not None and mirror == outputs and not self._rank and re.match(NODE, name):
                    continue  # another node's
                if self._is_wanted(name, self.before):
                    replace(os.path.join(mirror, name), self._source, name, checkpoint_of(name) in complete)
                    # Those that the outputs lack are brought there again; all of them go there when the script removes them.
                    held[name] = self._state(name) if mirror == outputs else UNKNOWN_STATE
                    self.checkpoints.add(checkpoint_of(name) or name)
                    count += 1
        first, before = keep_list.read(self._records, 0) if self._rank else ({}, None)
        for name in self._names_in(self._first_outputs, first) if self._rank else ():
            if self._is_wanted(name, before) and not re.match(NODE, name):
                replace(os.path.join(self._first_outputs, name), self._source, name)
                self.borrowed[name] = self._state(name)
                count += 1
        self._report_newer()
        self.is_first = self._is_fresh and not held and not self.borrowed
        if self._patterns is None and not self._is_fresh:
            held.update(dict.fromkeys(self._find_earlier(), UNKNOWN_STATE))
        return count

    def _is_wanted(self, name: str, before: Mapping[str, Summary] | None) -> bool:
        """Return whether a kept file is to be brought here: it is not here, and the source has no newer one."""
        if name in self._mirrors.held:
            return False
        if self._patterns is None and self._is_fresh and has_changed(self._source, name, before):
            self._newer.add(name)
        here = not self._is_fresh and os.path.exists(os.path.join(self._source, name))
        return name not in self._newer and not here

    def _state(self, name: str) -> State:
        return state_of(os.stat(os.path.join(self._source, name)))

    def _report_newer(self) -> None:
        if self._newer:
            more = f" and {len(self._newer) - SHOWN} more" if len(self._newer) > SHOWN else ""
            self._log.say(
                f"keep: {', '.join(sorted(self._newer)[:SHOWN])}{more}: the source's new files are used; what earlier attempts"
                " wrote stays in the outputs"
            )

    def _find_earlier(self) -> list[str]:
        """Return what earlier starts wrote, or found, in this copy of the source: it is to be brought to the mirrors."""
        began_ns = os.stat(self._mark).st_ctime_ns
        names = (name for name in files(self._source, [""]) if is_result(name) and name not in self.borrowed)
        return [
            name
            for name in names
            if name not in self._mirrors.held
            and (name in self.recorded or os.stat(os.path.join(self._source, name)).st_ctime_ns >= began_ns)
        ]

    def _names_in(self, folder: str, recorded: Mapping[str, int]) -> Iterator[str]:
        """Yield the kept files in a mirror, without those of a checkpoint that is not whole there."""
        if self._patterns is not None:
            roots, is_kept = self._patterns
            yield from filter(is_kept, files(folder, roots))
            return
        for unit, names in group(recorded).items():
            sizes = {name: size_of(os.path.join(folder, name)) for name in names}
            if unit in recorded:  # a file by itself
                yield from (name for name in names if sizes[name] is not None)
            elif all(sizes[name] == recorded[name] for name in names) and is_whole(unit, names, recorded) is not False:
                yield from names
            elif any(size is not None for size in sizes.values()):
                self._log.say(f"keep: {unit} is not complete, so it is not copied to the working directory")
