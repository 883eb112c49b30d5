"""The whole state of a training, into a checkpoint and back: exact to the bit on the same layout.

    state                model and optimizer in torch.distributed.checkpoint's format, named by parameter, so that other
                         layouts can read it; for ZeRO in DeepSpeed's own
    loop.pt              schedule, gradient scaler, place in the data, what the loop counts
    rank-00000.pt ...    random numbers of each rank (python, numpy, torch, cuda) and what it counts alone

Where the model is the same on all ranks, rank 0 writes and reads alone and hands on what it read, so that nodes need no
common disk. Where it lies in parts, every rank writes and reads its own, below a folder that all nodes see.
"""

from __future__ import annotations

import io
import json
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoint
import epochs
import numpy as np
import parallel
import torch
import torch.distributed as dist
from refused import Refused


@dataclass
class Training:
    """What has state: the prepared model, the bare optimizer and schedule, the gradient scaler of fp16."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: Any = None
    parts: str = ""  # sharded or deepspeed: every rank has its own; otherwise all have the same
    layout: str = ""  # for people


@dataclass
class Keeper:
    """Writes the checkpoints of one attempt into the run's folder and finds the one to go on from."""

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
    replaced: bool = False  # a later start has claimed the run

    def __post_init__(self) -> None:
        self.saved_at = time.monotonic()
        self.epoch = self.epoch or self.attempt

    def save(self, step: int, training: Training, loop: dict[str, Any], mine: dict[str, Any]) -> None:
        """Write a checkpoint; collective, returns when it is complete. A disk that is full costs the checkpoint, not
        the training."""
        self.saved_at = time.monotonic()
        if step == self.saved_step:
            return
        ranks = parallel.every_rank({"random": random_state(), **mine})
        path = checkpoint.folder_of(self.folder, step, self.epoch)
        failed = parallel.from_rank_0(lambda: self._tried(step, lambda: checkpoint.begin(path)))
        if failed is None and training.parts:
            failed = next(
                filter(None, parallel.every_rank(self._tried(step, lambda: write_parts(path, training)))), None
            )
        if failed is None:
            failed = parallel.from_rank_0(lambda: self._tried(step, lambda: self._write(step, training, loop, ranks)))
        if failed is None:
            self.saved_step = step
        else:  # what lies there takes room that the next one may need
            parallel.from_rank_0(lambda: self._tried(step, lambda: checkpoint.discard(path)) if path.is_dir() else None)
        self.saved_at = time.monotonic()

    def _write(self, step: int, training: Training, loop: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        path = checkpoint.folder_of(self.folder, step, self.epoch)
        write(path, training, loop, ranks)
        facts = {"step": step, "attempt": self.attempt, "epoch": self.epoch, "world_size": len(ranks)}
        size = checkpoint.commit(path, **facts, parts=training.parts, layout=training.layout)
        self.verified.add(path.name)
        if not self._is_replaced():  # its successor goes on from what would be removed
            counts = epochs.Chain(self.folder, checkpoint.find(self.folder)).has
            checkpoint.prune(self.folder, self.keep, self.best, self.verified, counts)
        seconds = round(time.monotonic() - self.saved_at, 3)
        self.report("checkpoint", step=step, path=str(path), size_bytes=size, seconds=seconds)

    def _is_replaced(self) -> bool:
        """Return whether a later start has claimed the run, and say so once."""
        later = epochs.newest(self.folder)
        if later > self.epoch and not self.replaced:
            self.replaced = True
            problem = f"start {later} of this run has begun: checkpoints of this one, {self.epoch}, are chosen no more"
            self.report("alarm", reason=problem)
            self.say(problem)
        return self.replaced

    def _tried(self, step: int, act: Callable[[], None]) -> str | None:
        """Do a part of a checkpoint's writing; return what went wrong with the disk, and say it."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            act()
        except (OSError, CheckpointException) as error:
            problem = f"the checkpoint of step {step} could not be written: {error}"
            self.report("alarm", step=step, reason=problem)
            self.say(problem)
            return problem
        return None

    def go_back(self, name: str, training: Training) -> bool:
        """Put a checkpoint of that name back and return whether it could be; collective."""
        path = self.folder / name
        problem = parallel.from_rank_0(lambda: checkpoint.damage(path) if name else "none was written")
        if problem is not None:
            self.say(f"the best checkpoint cannot be had: {problem}")
            return False
        read(path, training)
        return True

    def _begin(self) -> tuple[int, checkpoint.Found | None]:
        """Claim the next epoch and choose what to go on from."""

        def choose() -> checkpoint.Found | None:
            counts = epochs.Chain(self.folder, checkpoint.find(self.folder)).has
            return checkpoint.newest(self.folder, self.say, counts)

        try:
            return epochs.claim(self.folder, self.attempt, self.given, choose)
        except OSError as error:
            problem = f"this start of the run could not be recorded: {error}"
            self.report("alarm", reason=problem)
            self.say(problem)
            return self.given or max(self.attempt, epochs.newest(self.folder) + 1), choose()

    def resume(self, training: Training) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Claim the run, put the newest complete checkpoint of its history back and return (loop, this rank's own), or
        None when there is none.

        Collective. Random numbers are left to the caller: they come last, when all else is ready.
        """
        if training.parts:
            check_seen(self.folder)
        self.epoch, found = parallel.from_rank_0(self._begin)
        if found is None:
            return None
        self.verified.add(found.path.name)
        parallel.from_rank_0(lambda: check_layout(found.path, training))
        loop, ranks = read(found.path, training)
        self.saved_step = found.step
        self.say(f"resumed from {found.path}")
        rank = dist.get_rank() if dist.is_initialized() else 0
        return loop, ranks[rank] if len(ranks) == parallel.world_size() else {}


def write(path: Path, training: Training, loop: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Write the state below a folder, or what does not lie in parts; on one rank alone."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if not training.parts:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is, on purpose
            save(_tensors(training), checkpoint_id=path / "state", no_dist=True)
    scaler = training.scaler.state_dict() if training.scaler is not None else {}
    _save({**loop, "schedule": training.schedule.state_dict(), "scaler": scaler}, path / "loop.pt")
    for rank, mine in enumerate(ranks):
        _save(mine, path / f"rank-{rank:05d}.pt")


def _save(what: Any, path: Path) -> None:
    """Write something small; torch's own way to a file raises no OSError when the disk is full."""
    made = io.BytesIO()
    torch.save(what, made)
    path.write_bytes(made.getbuffer())


def write_parts(path: Path, training: Training) -> None:
    """Write this rank's part of model and optimizer below a folder; collective."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if not all(parallel.every_rank(path.is_dir())):  # on all ranks alike: nobody may wait for one that gave up
        raise OSError(f"{path} is not there on every node")
    if training.parts == "deepspeed":
        try:
            training.model.save_checkpoint(str(path / "state"), tag="parts", save_latest=False)
        except RuntimeError as error:  # so torch says it when a file cannot be written
            raise OSError(str(error).splitlines()[0]) from error
    else:
        save(_tensors(training), checkpoint_id=path / "state")


def read_parts(path: Path, training: Training) -> None:
    """Put this rank's part of model and optimizer back; collective."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if training.parts == "deepspeed":
        training.model.load_checkpoint(str(path / "state"), tag="parts")
        return
    state = _tensors(training)
    load(state, checkpoint_id=path / "state")
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_options(training),
    )


def check_seen(folder: Path) -> None:
    """Raise Refused unless all ranks see what rank 0 writes into the folder; collective."""
    mark = folder / ".seen"
    parallel.from_rank_0(mark.touch)
    blind = [rank for rank, sees in enumerate(parallel.every_rank(mark.exists())) if not sees]
    parallel.from_rank_0(lambda: mark.unlink(missing_ok=True))
    if blind:
        raise Refused(
            f"rank {blind[0]} does not see rank 0's checkpoints in {folder}: a model in parts needs a folder that all nodes "
            "share, or strategy ddp"
        )


def check_layout(path: Path, training: Training) -> None:
    """Raise Refused for a checkpoint of a layout from which this one cannot go on."""
    facts = json.loads((path / checkpoint.MARKER).read_bytes())
    parts, layout = facts.get("parts", ""), facts.get("layout", "")
    if parts != training.parts or (layout != training.layout and "pipeline" in f"{parts} {layout} {training.layout}"):
        raise Refused(f"{path} is of {layout}, which {training.layout} cannot go on from: resume it as it was")
    if parts == "deepspeed" and layout != training.layout:
        raise Refused(f"{path} is of {layout}: ZeRO reads its own layout only, not {training.layout}")


def read(path: Path, training: Training) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put model, optimizer, schedule and scaler back and return (loop, each rank's own); collective."""
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {} if training.parts else _tensors(training)

    def on_rank_0() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if state:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(state, checkpoint_id=path / "state", no_dist=True)
        loop = torch.load(path / "loop.pt", weights_only=True)
        return loop, [torch.load(file, weights_only=True) for file in sorted(path.glob("rank-*.pt"))]

    loop, ranks = parallel.from_rank_0(on_rank_0)
    if training.parts:
        read_parts(path, training)
    else:
        state = _handed_on(state)
        set_state_dict(
            training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    training.schedule.load_state_dict(loop.pop("schedule"))
    if (scaler := loop.pop("scaler")) and training.scaler is not None:
        training.scaler.load_state_dict(scaler)
    return loop, ranks


def _tensors(training: Training) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(training.model, training.optimizer, options=_options(training))
    return {"model": model, "optimizer": optimizer}


def _options(training: Training) -> Any:
    """Return how states are named: in parts each parameter for itself, since no two ranks need have the same ones."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=bool(training.parts))


def _handed_on(state: Any) -> Any:
    """Return rank 0's nested state: its tensors filled in place, all else sent at once; collective."""

    def walk(value: Any, leaf: Callable[[Any], Any]) -> Any:
        if isinstance(value, dict):
            return {name: walk(item, leaf) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(walk(item, leaf) for item in value)
        return leaf(value)

    def filled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return next(others)
        dist.broadcast(value, src=0)
        return value

    if not dist.is_initialized():
        return state
    plain: list[Any] = []
    walk(state, lambda value: None if isinstance(value, torch.Tensor) else plain.append(value))
    others = iter(parallel.from_rank_0(lambda: plain))
    return walk(state, filled)


def random_state() -> dict[str, Any]:
    """Return this process's random numbers, as plain data and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on with random numbers where `random_state` stood."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
