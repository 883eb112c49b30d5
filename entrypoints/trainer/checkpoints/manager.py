"""Save checkpoints in the background, and resume from the newest one.

A save stops the training while its state is copied into the host's memory. A thread of each rank, with a process group of
its own, does the slow part, writing and hashing, while the training continues. One save runs at a time; the next one
waits for it. The main thread reports results: two threads that print at once would mix their lines.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .. import collectives
from ..clock import SYSTEM, Clock
from ..errors import Unsupported
from . import epochs, files, memory, parts, state
from .state import Snapshot, TrainingState


@dataclass
class CheckpointManager:
    """Writes the checkpoints of one attempt into the run's folder and finds the one to resume from; made by all ranks."""

    folder: Path
    attempt: int
    keep: int
    report: Callable[..., None]  # kind, data: an event
    say: Callable[[str], None]
    best: str = ""  # a checkpoint that is kept whatever comes after it
    saved_step: int = -1
    saved_at: float = 0.0
    given: int = 0  # the epoch that the launcher has claimed in the output
    epoch: int = 0  # this start's; the attempt's number before `resume`
    verified: set[str] = field(default_factory=set)  # names of checkpoints whose bytes are known to be right
    behind: bool = True  # the training continues while a checkpoint is written
    shared: bool = True  # all ranks have one folder; else each node has the parts of its ranks
    clock: Clock = SYSTEM

    def __post_init__(self) -> None:
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # so it is, where rank 0 writes alone
        self.saved_at = self.clock.monotonic()
        self.epoch = self.epoch or self.attempt
        self._group = collectives.own_group()
        self._copy = state.HostCopy()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[str | None] | None = None
        self._step = -1  # that is being written
        self._news: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._blocked_s = 0.0

    # -- saving -------------------------------------------------------------------------------------------------------

    def due(self, every_s: float | None) -> bool:
        """Return whether so much time has passed since the state was last taken; not while that is still being written."""
        return every_s is not None and not self.busy and self.clock.monotonic() - self.saved_at >= every_s

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def save(self, step: int, training: TrainingState, loop: dict[str, Any], mine: dict[str, Any]) -> None:
        """Take the training's state and begin to write it; collective. Waits for the save before this one.

        A disk that is full costs the checkpoint, not the training.
        """
        began = self.clock.monotonic()
        self.wait()
        self.saved_at = self.clock.monotonic()
        if step == self.saved_step:
            return
        tensors = state.tensors(training) if training.parts or collectives.rank() == 0 else {}
        behind = self.behind and training.parts != "deepspeed" and self._has_room(tensors, training)
        gathered = collectives.every_rank(({"random": state.random_state(), **mine}, behind))
        behind = all(can for _, can in gathered)
        if behind:
            tensors = self._copy(tensors)
        taken = state.take(training, tensors, loop, [own for own, _ in gathered])
        if behind:
            self._step, self._writing = step, self._thread.submit(self._write, step, taken, training, began)
        elif self._write(step, taken, training, began) is None:
            self.saved_step = step
        self._blocked_s = self.clock.monotonic() - began
        self.report_results()

    def wait(self) -> None:
        """Return when nothing is being written any more, and report the result; on all ranks alike.

        Raises Unsupported where a later start has replaced this one.
        """
        try:
            if self._writing is not None:
                writing, self._writing = self._writing, None
                if writing.result() is None:
                    self.saved_step = self._step
        finally:
            self.report_results()

    @property
    def last_good(self) -> str:
        """Where the last complete checkpoint of this start is, in a sentence."""
        if self.saved_step < 0:
            return "no checkpoint was written"
        path = files.folder_of(self.folder, self.saved_step, self.epoch)
        return f"the last complete checkpoint is that of step {self.saved_step}, {path}"

    def report_results(self) -> None:
        """Report the results of saves since the last call; does not block."""
        while not self._news.empty():
            kind, data = self._news.get()
            if kind == "checkpoint":
                data["stood_s"] = round(self._blocked_s, 3)
            self.report(kind, **data)
            if kind == "alarm":
                self.say(data["reason"])

    def _has_room(self, tensors: dict[str, Any], training: TrainingState) -> bool:
        """Return whether this node's memory takes a copy of what its ranks hold; the copy is kept for the next save."""
        if self._copy.made:
            return True
        if not self._copy.possible:
            if self.saved_step < 0:
                self.say("training pauses while a checkpoint is written; with torch 2.9 or newer it continues")
            return False
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) if training.parts else 1
        needed, free = state.bytes_of(tensors) * ranks, memory.free_bytes()
        if needed <= free * 0.8:
            return True
        reason = f"a copy of the state takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        self.say(f"training pauses while a checkpoint is written: {reason}")
        return False

    def _write(self, step: int, taken: Snapshot, training: TrainingState, began: float) -> str | None:
        """Write what was taken and return what went wrong with the disk; collective."""
        path = files.folder_of(self.folder, step, self.epoch)
        self.check_ranks()
        failed = self._on_disks(step, lambda: files.begin(path))
        if failed is None and training.parts:
            failed = self._on_ranks(step, lambda: state.write_parts(path, taken, training, self._group))
        elsewhere: dict[str, dict[str, Any]] = {}
        if failed is None and not self.shared:
            index, own = parts.index(path, self._group), {}
            failed = self._on_ranks(step, lambda: own.update(parts.settle(path, index) if parts.follows() else {}))
            elsewhere = parts.elsewhere(own, self._group)
        if failed is None:
            failed = self._on_rank_0(step, lambda: self._commit(step, path, taken, training, began, elsewhere))
        if failed is not None:  # what lies there takes room that the next one may need
            self._on_disks(step, lambda: files.discard(path) if path.is_dir() else None)
        kept = collectives.from_rank_0(self._tidy if failed is None else self.check_current, self._group)
        if kept is not None and not self.shared and parts.follows():
            self._tried(step, lambda: parts.remove_all_but(self.folder, kept, self.epoch))
        return failed

    def _on_rank_0(self, step: int, act: Callable[[], None]) -> str | None:
        return collectives.from_rank_0(lambda: self._tried(step, act), self._group)

    def _on_ranks(self, step: int, act: Callable[[], None]) -> str | None:
        """Do something on every rank and return what went wrong on any; collective."""
        mine = self._tried(step, act)
        return next(filter(None, collectives.every_rank(mine, self._group)), None)

    def _on_disks(self, step: int, act: Callable[[], None]) -> str | None:
        """Do something once for each disk that holds checkpoints: on rank 0, or on the first rank of each node."""
        if self.shared:
            return self._on_rank_0(step, act)
        return self._on_ranks(step, act if parts.leads() else lambda: None)

    def _commit(
        self, step: int, path: Path, taken: Snapshot, training: TrainingState, began: float, elsewhere: dict[str, Any]
    ) -> None:
        state.write(path, taken, training)
        facts = {"step": step, "attempt": self.attempt, "epoch": self.epoch, "world_size": collectives.world_size()}
        size = files.commit(path, elsewhere=elsewhere, **facts, parts=training.parts, layout=training.layout)
        self.verified.add(path.name)
        seconds = round(self.clock.monotonic() - began, 3)
        self._report_later("checkpoint", step=step, path=str(path), size_bytes=size, seconds=seconds)

    def check_current(self) -> None:
        """Raise Unsupported where a later start has claimed the run: this one must not change anything any more."""
        later = epochs.newest(self.folder)
        if later > self.epoch:
            raise Unsupported(f"start {later} of this run has started: this one, {self.epoch}, ends")

    def check_ranks(self) -> None:
        """Raise Unsupported on every rank where a later start has claimed the run; collective, waits for rank 0."""
        collectives.from_rank_0(self.check_current, self._group)

    def _tidy(self) -> list[str]:
        """Remove older checkpoints, unless this start is replaced, and return the names of those that are left.

        What cannot be removed costs no other checkpoint.
        """
        self.check_current()
        try:
            counts = epochs.Chain(self.folder, files.find(self.folder)).has
            files.prune(self.folder, self.keep, self.best, self.verified, counts, self.epoch)
        except OSError as error:
            self._report_later("alarm", reason=f"older checkpoints could not be removed: {error}")
        return [checkpoint.path.name for checkpoint in files.find(self.folder)]

    def _tried(self, step: int, act: Callable[[], None]) -> str | None:
        """Do a part of a checkpoint's writing; return what went wrong with the disk, and report it."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            act()
        except (OSError, CheckpointException) as error:
            problem = f"the checkpoint of step {step} could not be written to {self.folder}: {error}"
            self._report_later("alarm", step=step, reason=problem)
            return problem
        return None

    def _report_later(self, kind: str, **data: Any) -> None:
        self._news.put((kind, data))

    # -- resume -------------------------------------------------------------------------------------------------------

    def go_back(self, name: str, training: TrainingState) -> bool:
        """Put a checkpoint of that name back and return whether it could be; collective."""
        self.wait()
        path = self.folder / name
        problem = collectives.from_rank_0(lambda: parts.damage(path, training.parts) if name else "none was written")
        if problem is not None:
            self.say(f"the best checkpoint cannot be loaded: {problem}")
            return False
        state.read(path, training)
        return True

    def hold_best(self, name: str) -> str:
        """Keep an earlier start's best checkpoint, as one of this start's own; return its name now. Collective."""
        self.best = name
        if (match := files.NAME.fullmatch(name)) and not self.given:
            best = files.Checkpoint(int(match[2]), int(match[1]), self.folder / name)
            if held := collectives.from_rank_0(lambda: files.hold(best, self.epoch)):
                self.best = held.path.name
        return self.best

    def _begin(self, everywhere: set[str] | None) -> tuple[int, files.Checkpoint | None, files.Checkpoint | None]:
        """Claim the next epoch; return it, what to resume from and this start's own links to that.

        Args:
            everywhere: names of the checkpoints that every node's disk has; None for a shared folder.

        Raises Unsupported where a later start has begun.
        """

        def choose() -> files.Checkpoint | None:
            while True:
                marked = files.marked(self.folder)
                found = list(marked)
                chain = epochs.Chain(self.folder, found)
                lacking = (
                    {}
                    if everywhere is None
                    else {each: parts.ABSENT for each in found if each.path.name not in everywhere}
                )
                chosen = files.newest(self.folder, self.say, chain.has, lacking)
                if chosen is not None or files.marked(self.folder) == marked:
                    return chosen
                # An older start has removed what was being looked at, for one that is newer: look again.

        while True:
            try:
                self.epoch, chosen = epochs.claim(self.folder, self.attempt, self.given, choose)
            except OSError as error:
                problem = f"this start of the run could not be recorded: {error}"
                self.report("alarm", reason=problem)
                self.say(problem)
                chosen = choose()
                return self.given or max(self.attempt, epochs.newest(self.folder) + 1), chosen, chosen
            if epochs.in_vain(self.folder, self.attempt, self.epoch):
                raise Unsupported(
                    f"this is the third start of attempt {self.attempt} from the same place: the two before were lost "
                    "before they saved a new checkpoint; save more often (checkpoint.every), then run "
                    "`cloudtrain resume`"
                )
            if chosen is None or self.given:  # in the output a start that was replaced removes nothing
                return self.epoch, chosen, chosen
            if (held := files.hold(chosen, self.epoch)) is not None:
                return self.epoch, chosen, held
            self.check_current()  # an older start removed it before it could see this one: there is a newer checkpoint

    def resume(self, training: TrainingState) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Claim the run, put the newest complete checkpoint of its history back and return (loop, this rank's own), or
        None when there is none.

        Collective. Random numbers are left to the caller: they come last, when all else is ready.
        """
        everywhere = None
        if training.parts:
            self.shared = parts.is_shared(self.folder, self.given > 0)
            everywhere = None if self.shared else parts.on_every_disk(self.folder)
        self.epoch, chosen, checkpoint = collectives.from_rank_0(lambda: self._begin(everywhere))
        if chosen is None or checkpoint is None:
            return None
        checkpoint = replace(checkpoint, path=self.folder / checkpoint.path.name)  # another node's folder is elsewhere
        self.verified |= {chosen.path.name, checkpoint.path.name}
        try:
            collectives.from_rank_0(lambda: state.check_layout(checkpoint.path, training))
            loop, ranks = state.read(checkpoint.path, training)
        except Exception:
            self.check_current()  # a later start may have removed it
            raise
        alike = partial(state.same_layout, checkpoint.path, training)
        self.saved_step = checkpoint.step
        self.say(f"resumed from {chosen.path}")
        return loop, ranks[collectives.rank()] if collectives.from_rank_0(alike) else {}
