"""Bring files that the script writes in its working directory into the run's outputs, all of them or those of `keep`.

They are mirrored while the ranks run and at the end, and are back in the working directory when the next attempt begins.
A node's files lie below outputs/ by their own names; those of other nodes than the first below outputs/node-N/.
With `keep: auto` a list of them lies beside the outputs, for the script may have written there itself.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ..log import Log
from . import keep_list
from .keep_choice import LIMIT, SMALL, Choice, group, state_of
from .keep_mirrors import Mirrors
from .keep_patterns import compile_pattern, literal
from .keep_report import SHOWN, describe, explain_limit, explain_links, largest, measure
from .keep_restore import NODE, Restore, linkable
from .keep_source import UNKNOWN, Summary, survey
from .script_files import (
    OURS,
    checkpoint_of,
    files,
    folder_links,
    holds_credentials,
    is_result,
    is_saved_state,
    is_storable,
    open_for_writing,
)
from .written import step_of

EVERY_S = 15.0
REST = 4  # how many times as long as a search it waits at least: on a file system of a network a search takes minutes


class Keeper:
    """Mirrors one node's files; `safe` is a second folder, which a platform brings back when it starts the job again.

    A file goes from a mirror only when the script has removed it: two looks have not found it, and all that the second
    one did find is in the mirrors by then. A file that is renamed is therefore never without a copy.
    """

    def __init__(
        self,
        patterns: Sequence[str] | None,  # None: all results, in the folder `records` a list of them
        source: str,
        outputs: str,
        node_rank: int,
        log: Log,
        safe: str | None = None,
        records: str = "",
        limit: int = LIMIT,
        has_one_source: bool = False,  # all nodes share the working directory, as on Slurm
        beside: Sequence[Keeper] = (),  # of the run's folders that the platform does not bring back
        skips: Callable[[str], bool] | None = None,  # files of such a folder that another one keeps
    ) -> None:
        self._beside, self._skips = beside, skips
        self._auto, self._records, self._rank, self._limit = patterns is None, records, node_rank, limit
        self._patterns = [compile_pattern(pattern) for pattern in patterns or ()]
        self._roots = [""] if patterns is None else sorted({literal(pattern) for pattern in patterns})
        self._source, self._log = source, log
        self._is_other, self._first_outputs = node_rank > 0, outputs
        self._leaves_all = self._is_other and has_one_source  # the first node does it
        self._outputs = os.path.join(outputs, f"node-{node_rank}") if node_rank else outputs
        folders = [self._outputs, *([os.path.join(safe, f"node-{node_rank}")] if safe else [])]
        self._mirrors = Mirrors(folders, source, log)
        self._mark = os.path.join(source, OURS, "began")
        patterns_of = None if patterns is None else (self._roots, self._is_kept)
        self._earlier = Restore(self._mirrors, source, outputs, records, node_rank, log, self._mark, patterns_of)
        self._recorded: dict[str, int] = {}  # the list: name -> size
        self._known: set[str] = set()  # all names that were in it
        self._before: dict[str, Summary] | None = None  # what they were in the source, where it had them
        self._choice = Choice(source, limit)
        self._reported: set[str] = set()  # checkpoints
        self.report: Callable[..., None] = lambda path, **data: log.event("checkpoint", **data)  # of a script's own
        self._refused: set[str] = set()  # files that hold credentials, or cannot be read
        self._unreadable: set[str] = set()
        self._search_s = 0.0  # how long the last search took
        self._every_s = float(os.environ.get("CLOUDTRAIN_SYNC_EVERY_S") or EVERY_S)
        self.not_kept = ""  # what the ranks wrote elsewhere, once they have ended
        self._began_ns = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_active(self) -> bool:
        """Whether anything is kept."""
        return self._auto or bool(self._patterns)

    @property
    def has_restored(self) -> bool:
        """Whether earlier starts have left anything, before the ranks begin."""
        return bool(self._mirrors.held or self._earlier.borrowed) or any(each.has_restored for each in self._beside)

    @property
    def folders(self) -> list[str]:
        """The folders of the working directory below which checkpoints of earlier starts can lie."""
        if self._earlier.is_first:
            return []
        given = {*self._mirrors.held, *self._earlier.borrowed}
        roots = {os.path.dirname(at) for at in map(checkpoint_of, given) if at} if self._auto else self._roots
        return [os.path.join(self._source, root) for root in sorted(roots)]

    @property
    def _disk(self) -> str:
        return self._first_outputs if os.path.isdir(self._first_outputs) else self._source

    def wants(self, name: str) -> bool:
        """Return whether a file below outputs/, wherever that is, is brought to this node."""
        node = re.match(NODE, name)
        prefix = node[0] if node else ""
        mine = os.path.basename(self._outputs) + "/" if self._is_other else ""
        return prefix == mine or (self._auto and not prefix)

    def is_kept_output(self, name: str) -> bool:
        """Return whether a file below outputs/ is a kept one: of this node, or with patterns of any."""
        if self._auto:
            mine = os.path.basename(self._outputs) + "/" if self._is_other else ""
            return name.startswith(mine) and name[len(mine) :] in self._known
        return self._is_kept(re.sub(rf"\A{NODE}", "", name))

    def restore(self) -> int:
        """Copy what earlier starts left into the working directory and return how many files; blocking."""
        count = sum(each.restore() for each in self._beside)
        if self._leaves_all:
            self._earlier.note_first()
            return 0
        count += self._earlier.run()
        self._recorded, self._before = self._earlier.recorded, self._earlier.before
        self._known, self._reported = {*self._recorded}, self._earlier.checkpoints
        return count

    def begin(self) -> None:
        """The ranks start: what changes from now on is theirs. Mirrors in the background."""
        try:
            with open(self._mark, "w"):
                pass
            self._began_ns = os.stat(self._mark).st_ctime_ns  # by the clock of this file system
        except OSError:  # it cannot be written
            self._began_ns = int(self._log.clock.now() * 1e9)
        for each in self._beside:
            each.begin()
        if self.is_active and not self._leaves_all:
            self._thread = threading.Thread(target=self._run, name="keep", daemon=True)
            self._thread.start()

    def finish(self, stopped: bool = False, succeeded: bool = False) -> str:
        """Mirror once more, and log what is not kept; return "" or what went wrong. Blocking.

        A platform soon ends what was `stopped`: large files share their content with the copies, which takes no time.
        No attempt follows one that `succeeded`, so the run's own folders need no second copy then.
        """
        if not self._began_ns or self._leaves_all:
            return ""
        self._join()
        self._refused -= self._unreadable  # they are tried once more
        problem = self._look(is_last=True, stopped=stopped) if self.is_active else ""
        self._report_rest()
        for each in self._beside:
            each._join()
            if succeeded:
                each._mirrors.remove(each._mirrors.held)
            else:
                problem = each._look(is_last=True, stopped=stopped) or problem
        return problem

    def _join(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        reported, over = "", ""
        if self._auto:
            self._survey()
        while not self._log.clock.wait(self._end, max(self._every_s, REST * self._search_s)):
            try:
                problem = self._look()
            except Exception as error:  # the next look may work
                problem = f"{type(error).__name__}: {error}"
            if problem and problem != reported:
                self._log.say(f"files could not be copied to the run's outputs: {problem}; trying again")
            reported = problem
            if self._choice.over and not over:
                over = explain_limit(self._choice.over, self._limit)
                self._log.say(over)
                self._log.event("alarm", reason=over)

    def _survey(self) -> None:
        """Remember the source's files, but for those that earlier attempts changed: of these it is recorded."""
        found = survey(self._source, self._began_ns, self._end.is_set)
        if found is None:
            self._before = None
            return
        old = self._before if self._before is not None else dict.fromkeys(self._mirrors.held, UNKNOWN)
        here = {name: summary for name, summary in found.items() if name not in self._mirrors.held}
        self._before = {**here, **{name: summary for name, summary in old.items() if name in self._mirrors.held}}

    def _look(self, is_last: bool = False, stopped: bool = False) -> str:
        """Bring the mirrors up to date and return "" or the first thing that went wrong. After the last one nothing moves."""
        began = self._log.clock.monotonic()
        problem, present, lost = "", dict(self._find()), {}
        self._search_s = self._log.clock.monotonic() - began
        chosen = self._choice.choose(present, self._mirrors.held, is_last) if self._auto else list(present)
        if self._auto and chosen:
            problem = self._record({name: present[name].st_size for name in chosen})
        changed = [name for name in chosen if self._mirrors.held.get(name) != state_of(present[name])]
        complete = linkable(present) if changed and self._auto else set()
        for name in changed:
            path, may_link = os.path.join(self._source, name), checkpoint_of(name) in complete
            may_link = may_link or (stopped and present[name].st_size > SMALL)
            try:
                if self._auto and self._is_refused(name, path):
                    continue
                if not (is_last or may_link or self._mirrors.has_room(name, present[name].st_size, self._disk)):
                    continue
                # Other files than a checkpoint's may have been written again while those before were copied.
                state = state_of(present[name] if is_last or checkpoint_of(name) else os.stat(path))
                rests = partial(self._rests, name, state) if self._auto and not is_last else lambda: True
                if self._mirrors.copy(name, may_link, rests, is_last):
                    self._mirrors.held[name] = state
            except FileNotFoundError:
                continue  # the script has removed it meanwhile
            except OSError as error:
                problem = problem or f"{name} cannot be copied to the output: {error.strerror or error}"
                lost[name] = present[name].st_size
        if len(lost) > 1:
            problem += f"; not copied are {describe(lost)}, {len(lost)} files"
        if self._auto and not self._refused.isdisjoint(changed):  # or their checkpoints would count as incomplete
            problem = (
                self._record({name: present[name].st_size for name in chosen if name in self._mirrors.held}) or problem
            )
        self._report_checkpoints(changed, present)
        over = (name for name in self._mirrors.held if (checkpoint_of(name) or name) in self._choice.over)
        self._mirrors.follow(present, over, is_last, not problem)
        return problem

    def _rests(self, name: str, state: tuple[int, int]) -> bool:
        """Return, after a copy, whether nobody wrote to the file meanwhile."""
        is_open = name in self._choice.restless and name in open_for_writing(self._source)
        return not is_open and state_of(os.stat(os.path.join(self._source, name))) == state

    def _find(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files that the ranks have made or changed and that are to be kept, with their states."""
        for name in files(self._source, self._roots):
            try:
                status = os.stat(os.path.join(self._source, name))
            except OSError:
                continue  # the script has removed it meanwhile
            came = status.st_ctime_ns < self._began_ns or self._earlier.borrowed.get(name) == state_of(status)
            if came and name not in self._mirrors.held:  # with the source, or from the first node
                continue
            if name not in self._refused and self._is_kept(name):
                yield name, status

    def _is_refused(self, name: str, path: str) -> bool:
        """Return whether a file that nobody has named is left out, and say so. Raises OSError."""
        try:
            why = "has a name that no store takes" if not is_storable(name) else ""
            why = why or ("looks like a credential" if holds_credentials(path, self._log.masks) else "")
            with open(path, "rb"):
                pass
        except PermissionError:
            why = "cannot be read"
            self._unreadable.add(name)
        if why:
            self._refused.add(name)
            self._log.say(f"keep: {name if is_storable(name) else ascii(name)} {why} and is not kept")
        return bool(why)

    def _report_checkpoints(self, changed: Sequence[str], present: Mapping[str, object]) -> None:
        """Report checkpoints that have been copied whole, so that others know from where the next attempt can resume."""
        if not changed or self._skips:
            return
        units = group(present)
        for unit in dict.fromkeys(checkpoint_of(name) or name for name in changed):
            is_checkpoint = unit not in present or is_saved_state(unit)
            held = [name for name in units[unit] if name not in self._refused]
            if (
                is_checkpoint
                and unit not in self._reported
                and held
                and all(name in self._mirrors.held for name in held)
            ):
                self._reported.add(unit)
                self.report(os.path.join(self._outputs, unit), kept=unit, **step_of(unit))

    def _record(self, names: dict[str, int]) -> str:
        """Write the list of what the mirrors hold from now on, before they do; return "" or what went wrong."""
        held = {name: size for name, size in self._recorded.items() if name in self._mirrors.held}
        names = {**held, **names}
        if names == self._recorded:
            return ""
        if problem := keep_list.write(self._records, self._rank, names, self._before):
            return problem
        self._recorded = names
        self._known.update(names)
        return ""

    def _is_kept(self, name: str) -> bool:
        if self._skips and self._skips(name):
            return False
        return is_result(name) if self._auto else any(pattern.match(name) for pattern in self._patterns)

    def _wrote_elsewhere(self, name: str, status: os.stat_result) -> bool:
        """Return whether a file is of the ranks, and not kept."""
        return status.st_ctime_ns >= self._began_ns and not self._is_kept(name) and not name.endswith(".pyc")

    def _report_rest(self) -> None:
        """Log in one line what is kept without being named, and in one what is not kept."""
        if self._auto:
            if self._mirrors.held:
                sizes = {name: size for name, (size, _) in self._mirrors.held.items()}
                self._log.say(f"keep: {describe(sizes)} {'is' if len(sizes) == 1 else 'are'} in the run's outputs")
            outside, inside = explain_links(folder_links(self._source, self._began_ns), self._source)
            if inside:
                self._log.say(f"keep: {inside}")
            self.not_kept = "; ".join(filter(None, (explain_limit(self._choice.over, self._limit), outside)))
        elif sizes := measure(self._source, self._wrote_elsewhere):
            names = ", ".join(top.rstrip("/") for top in largest(sizes)[:SHOWN])
            self.not_kept = (
                f"{describe(sizes)} are not kept, and the next attempt will not find them: set keep: [{names}] in the job"
                f" file, or add --set 'keep=[{names}]' to submit"
            )
        if self.not_kept:
            self._log.say(self.not_kept)
