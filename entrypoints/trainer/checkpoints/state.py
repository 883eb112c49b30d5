"""Write and restore the training state (model, optimizer, schedule, random numbers); bit-exact on the same layout.

    state                model and optimizer in torch.distributed.checkpoint's format, named by parameter, so that other
                         layouts can read it; for ZeRO in DeepSpeed's own
    loop.pt              schedule, gradient scaler, place in the data, what the loop counts
    rank-00000.pt ...    random numbers of each rank (python, numpy, torch, cuda) and what it counts alone

Where the model is the same on all ranks, rank 0 writes and reads alone and hands on what it read, so that nodes need no
common disk. Where it lies in parts, every rank writes and reads its own, below a folder that all nodes see or on its own
node's disk: then the launchers bring the parts of all nodes to the output, and all parts to each node before a resume.
"""

from __future__ import annotations

import io
import json
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import collectives
from ..errors import Unsupported
from .files import MARKER


@dataclass
class TrainingState:
    """What has state: the prepared model, the bare optimizer and schedule, the gradient scaler of fp16."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: Any = None
    parts: str = ""  # sharded or deepspeed: every rank has its own; otherwise all have the same
    layout: str = ""  # for people
    tied: tuple[str, str] | None = None  # a parameter that is another one's twin here: its name, and the common one


@dataclass
class Snapshot:
    """A training's state at one step, as it goes onto the disk."""

    tensors: dict[str, Any]  # model and optimizer, or this rank's part; empty where another rank writes them
    files: dict[str, bytes]  # what is small, on rank 0


class HostCopy:
    """Copies states into the host's memory, which it keeps: the first time takes longer than all that follow."""

    def __init__(self) -> None:
        self.made = False
        self._stager: Any = None

    @property
    def possible(self) -> bool:
        """Whether this version of torch copies sharded states: from 2.9 on."""
        from torch.distributed.checkpoint import staging

        return hasattr(staging, "DefaultStager")

    def __call__(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy that the training does not touch; it is overwritten by the next one."""
        if self._stager is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            cuda = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))
        self.made = True
        copied: dict[str, Any] = self._stager.stage(state)
        return copied


def take(
    training: TrainingState, tensors: dict[str, Any], loop: dict[str, Any], ranks: list[dict[str, Any]]
) -> Snapshot:
    """Return the state as it goes onto the disk; what is not among the tensors is as it was now, whatever comes after."""
    if collectives.rank() != 0:
        return Snapshot(tensors, {})
    scaler = training.scaler.state_dict() if training.scaler is not None else {}
    files = {"loop.pt": _packed({**loop, "schedule": training.schedule.state_dict(), "scaler": scaler})}
    return Snapshot(tensors, files | {f"rank-{rank:05d}.pt": _packed(mine) for rank, mine in enumerate(ranks)})


def write(path: Path, taken: Snapshot, training: TrainingState) -> None:
    """Write the state below a folder, or what does not lie in parts; on one rank alone."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if not training.parts:
        save(taken.tensors, checkpoint_id=path / "state", no_dist=True)
    for name, data in taken.files.items():
        (path / name).write_bytes(data)  # torch's own way to a file raises no OSError when the disk is full


def _packed(value: Any) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def write_parts(path: Path, taken: Snapshot, training: TrainingState, group: Any) -> None:
    """Write this rank's part of model and optimizer below a folder; collective over the group."""
    from torch.distributed.checkpoint.state_dict_saver import save

    if not all(
        collectives.every_rank(path.is_dir(), group)
    ):  # on all ranks alike: no rank may wait for one that gave up
        raise OSError(f"{path} is not there on every node")
    if training.parts == "deepspeed":
        try:
            training.model.save_checkpoint(str(path / "state"), tag="parts", save_latest=False)
        except RuntimeError as error:  # so torch says it when a file cannot be written
            raise OSError(str(error).splitlines()[0]) from error
    else:
        save(taken.tensors, checkpoint_id=path / "state", process_group=group)


def read_parts(path: Path, training: TrainingState) -> None:
    """Put this rank's part of model and optimizer back; collective."""
    from torch.distributed.checkpoint.state_dict_loader import load

    if training.parts == "deepspeed":
        training.model.load_checkpoint(str(path / "state"), tag="parts")
        return
    state = tensors(training)
    load(state, checkpoint_id=path / "state")
    _put_back(state, training)


def check_layout(path: Path, training: TrainingState) -> None:
    """Raise Unsupported for a checkpoint of a layout from which this one cannot resume."""
    facts = json.loads((path / MARKER).read_bytes())
    parts, layout = facts.get("parts", ""), facts.get("layout", "")
    if "deepspeed" not in (parts, training.parts) or (parts, layout) == (training.parts, training.layout):
        return
    if parts == training.parts:
        raise Unsupported(
            f"{path} is of {layout}: ZeRO can resume only with the same strategy and world size, not {training.layout}"
        )
    raise Unsupported(
        f"{path} is of {layout}, which {training.layout} cannot resume from: use the strategy that wrote it"
    )


def same_layout(path: Path, training: TrainingState) -> bool:
    """Return whether a checkpoint's ranks are what these are: each continues with its own random numbers."""
    facts = json.loads((path / MARKER).read_bytes())
    return bool(facts.get("world_size") == collectives.world_size() and facts.get("layout") == training.layout)


def read(path: Path, training: TrainingState) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put model, optimizer, schedule and scaler back and return (loop, each rank's own); collective."""
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {} if training.parts else tensors(training)

    def on_rank_0() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if state:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(state, checkpoint_id=path / "state", no_dist=True)
        loop = torch.load(path / "loop.pt", weights_only=True)
        return loop, [torch.load(file, weights_only=True) for file in sorted(path.glob("rank-*.pt"))]

    loop, ranks = collectives.from_rank_0(on_rank_0)
    if training.parts:
        read_parts(path, training)
    else:
        _put_back(_handed_on(state), training)
    training.schedule.load_state_dict(loop.pop("schedule"))
    if (scaler := loop.pop("scaler")) and training.scaler is not None:
        training.scaler.load_state_dict(scaler)
    return loop, ranks


def tensors(training: TrainingState) -> dict[str, Any]:
    """Return model and optimizer by parameter, as they lie in memory; DeepSpeed's engine keeps its own to itself."""
    if training.parts == "deepspeed":
        return {}
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(training.model, training.optimizer, options=_options())
    return {"model": model, "optimizer": _renamed(optimizer, training.tied)}


def _put_back(state: dict[str, Any], training: TrainingState) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=_renamed(state["optimizer"], training.tied and training.tied[::-1]),
        options=_options(),
    )


def _renamed(optimizer: dict[str, Any], names: tuple[str, str] | None) -> dict[str, Any]:
    """Return the optimizer's flat state with one parameter under another name: where a matrix has a twin in the last stage
    of a pipeline, all other layouts know the one only."""
    if names is None:
        return optimizer
    before, after = ([f"{kind}.{name}." for kind in ("state", "param_groups")] for name in names)
    renamed = {}
    for key, value in optimizer.items():
        for old, new in zip(before, after, strict=True):
            key = new + key.removeprefix(old) if key.startswith(old) else key
        renamed[key] = value
    return renamed


def bytes_of(state: Any) -> int:
    """Return the size of this rank's tensors in a nested state; what is shared counts twice."""
    if isinstance(state, dict):
        return sum(bytes_of(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(bytes_of(value) for value in state)
    if isinstance(state, torch.distributed.tensor.DTensor):
        state = state.to_local()
    return state.numel() * state.element_size() if isinstance(state, torch.Tensor) else 0


def _options() -> Any:
    """Return how states are named: each parameter's for itself, since no two layouts need have the same groups."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


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
    others = iter(collectives.from_rank_0(lambda: plain))
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
    """Resume random numbers where `random_state` stood."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
