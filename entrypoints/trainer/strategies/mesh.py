"""ParallelismPlan: from the job's `parallelism` to a mesh of ranks; rejects combinations that do not exist.

Ranks are numbered as a mesh of five axes, the last one the fastest: neighbours share the most.

    pipeline    each holds some of the layers
    replicate   each holds what its neighbours on this axis hold, and takes other samples
    shard       each holds a part of every parameter, and takes other samples
    context     each takes a part of every sequence, the same samples; with fsdp it holds a part of every parameter, too
    tensor      each holds a part of every layer, and takes the same samples
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Unsupported

SCHEDULES = ("1f1b", "gpipe", "interleaved")
AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class StrategyKind:
    """One row of the table: what data-parallel ranks divide, and who carries it alone (without tensor or pipeline)."""

    carrier: str  # accelerate, deepspeed (through Accelerate) or sharded (DTensors)
    divides: str  # what each data-parallel rank has a part of
    data_parallel: bool = True
    models: bool = True  # may be combined with tensor, pipeline and context parallelism
    offload: bool = False


STRATEGIES: Mapping[str, StrategyKind] = {
    "none": StrategyKind("accelerate", "nothing", data_parallel=False),
    "ddp": StrategyKind("accelerate", "nothing"),
    "fsdp": StrategyKind("sharded", "parameters, gradients, optimizer state", offload=True),
    "hsdp": StrategyKind("sharded", "parameters, gradients, optimizer state, within a replica", offload=True),
    "zero1": StrategyKind("deepspeed", "optimizer state", models=False, offload=True),
    "zero2": StrategyKind("deepspeed", "gradients, optimizer state", models=False, offload=True),
    "zero3": StrategyKind("deepspeed", "parameters, gradients, optimizer state", models=False, offload=True),
}


@dataclass(frozen=True)
class ParallelismPlan:
    """The axes' lengths, and what goes with a pipeline."""

    strategy: str = "none"
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    microbatches: int | None = None  # None: as the batch allows
    schedule: str = "1f1b"
    virtual: int = 1  # stages on each rank
    offload: bool = False
    context: int = 1
    wrapped: str = ""  # classes of the layers that become units of FSDP, where an Accelerate file names them

    @property
    def world(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """How many take samples of their own."""
        return self.replicate * self.shard

    @property
    def gradient_ranks(self) -> int:
        """Over how many the gradient of a parameter is taken: those that see other samples, or other parts of them."""
        return self.data_ranks * self.context

    @property
    def parts(self) -> int:
        """Over how many data parallel ranks every parameter is dealt out."""
        return self.shard * self.context if self.strategy in ("fsdp", "hsdp") else self.shard

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def carrier(self) -> str:
        """Who configures it: accelerate, deepspeed, sharded or pipeline."""
        if self.pipeline > 1:
            return "pipeline"
        return "sharded" if self.tensor > 1 else STRATEGIES[self.strategy].carrier

    def data_rank(self, rank: int) -> int:
        """Return which samples a rank takes; ranks of one tensor, context or pipeline group have the same."""
        return rank // (self.tensor * self.context) % self.data_ranks

    def context_rank(self, rank: int) -> int:
        """Return which part of its sequences a rank takes."""
        return rank // self.tensor % self.context

    def stage_rank(self, rank: int) -> int:
        """Return a rank's place in its pipeline."""
        return rank // (self.tensor * self.gradient_ranks)

    @property
    def splits_model(self) -> str:
        """The key of the job file that splits layers, stages or sequences over ranks; empty without one."""
        sizes = {"tp_size": self.tensor, "pp_size": self.pipeline, "cp_size": self.context}
        return next((key for key, size in sizes.items() if size > 1), "")

    @property
    def mesh(self) -> dict[str, int]:
        """The axes that are longer than one."""
        return {name: length for name in AXES if (length := getattr(self, name)) > 1}

    @property
    def described(self) -> str:
        """The strategy and the axes for people: ddp, fsdp (shard 2 x tensor 2)."""
        axes = " x ".join(f"{name} {length}" for name, length in self.mesh.items())
        extra = f", {self.schedule}" if self.pipeline > 1 else ""
        return f"{self.strategy} ({axes}{extra})" if axes else self.strategy


def choose_plan(parallelism: Mapping[str, Any], world: int, nodes: int = 1) -> ParallelismPlan:
    """Return the layout that a job asks for; raises Unsupported for what no trainer here carries, never replacing it."""

    def size(name: str) -> int:
        return int(parallelism.get(name) or 1)

    name = str(parallelism.get("strategy") or ("ddp" if world > 1 else "none"))
    if name not in STRATEGIES:
        raise Unsupported(f"the shared trainer has no strategy {name}; it has {', '.join(STRATEGIES)}")
    strategy, tensor, pipeline, context = STRATEGIES[name], size("tp_size"), size("pp_size"), size("cp_size")
    split = {key: length for key in ("tp_size", "pp_size", "cp_size") if (length := size(key)) > 1}
    if not strategy.models and split:
        raise Unsupported(f"strategy {name} cannot be combined with {next(iter(split))}: use fsdp instead")
    if context > 1 and pipeline > 1:
        raise Unsupported(f"cp_size {context} cannot be combined with pp_size: use fsdp or tp_size instead of pp_size")
    each = tensor * pipeline * context
    if world % each:
        sizes = " x ".join(f"{key} {length}" for key, length in split.items())
        raise Unsupported(f"{sizes} does not divide the {world} processes of the job")
    replicate, shard = _data_axes(name, parallelism, world // each, nodes)
    if not strategy.data_parallel and replicate * shard > 1:
        raise Unsupported(f"strategy {name} is for one process, the job has {world} (remove it, or write ddp)")
    schedule, virtual = _pipeline(parallelism, pipeline)
    if parallelism.get("offload") and not strategy.offload:
        raise Unsupported(f"strategy {name} has nothing to offload; remove parallelism.offload")
    count = parallelism.get("microbatches")
    return ParallelismPlan(
        name, pipeline, replicate, shard, tensor, int(count) if count else None, schedule, virtual,
        bool(parallelism.get("offload")), context, str(parallelism.get("wrapped") or ""),
    )  # fmt: skip


def check_division(size: int, counts: Mapping[str, int]) -> None:
    """Raise Unsupported unless a model with so many heads and the like can be split over the ranks of a tensor group."""
    for what, count in counts.items() if size > 1 else ():
        if count % size:
            raise Unsupported(f"tp_size {size} does not divide the model's {count} {what}")


def check_layers(layers: int, stages: int) -> None:
    """Raise Unsupported unless the layers can be dealt out over the stages of a pipeline."""
    if layers % stages:
        raise Unsupported(f"{layers} layers cannot be split equally over {stages} pipeline stages")


def _data_axes(name: str, parallelism: Mapping[str, Any], data: int, nodes: int) -> tuple[int, int]:
    """Return (replicate, shard) for so many data-parallel ranks."""
    replicate, shard = parallelism.get("dp_replicate_size"), parallelism.get("dp_shard_size")
    if name == "hsdp":
        if replicate is None and shard is None:
            replicate = nodes  # sharding within a node, where links are fast
        replicate = int(replicate or data // int(shard or 1))
        shard = int(shard or data // replicate)
        if replicate * shard != data:
            raise Unsupported(
                f"hsdp: {replicate} replicas of {shard} shards do not make the {data} data-parallel processes of the job"
            )
        if replicate < 2 or shard < 2:
            sizes = [str(size) for size in range(2, data // 2 + 1) if data % size == 0]
            other = "ddp" if shard < 2 else "fsdp"
            raise Unsupported(
                "hsdp needs at least 2 replicas of at least 2 shards, and "
                f"the {data} data-parallel processes would be {replicate} of {shard}: "
                + (f"set dp_replicate_size to {' or '.join(sizes)}, or write {other}" if sizes else f"write {other}")
            )
        return replicate, shard
    whole = (1, data) if STRATEGIES[name].carrier != "accelerate" else (data, 1)
    for key, size, own in (("dp_replicate_size", replicate, whole[0]), ("dp_shard_size", shard, whole[1])):
        if size is not None and int(size) != own:
            hint = "write hsdp" if name == "fsdp" else "remove it"
            raise Unsupported(f"strategy {name} has a {key} of {own} here, not {size}: {hint}")
    return whole


def _pipeline(parallelism: Mapping[str, Any], pipeline: int) -> tuple[str, int]:
    """Return the schedule and the stages of a rank."""
    schedule, virtual = parallelism.get("pp_schedule"), parallelism.get("virtual_stages")
    if pipeline == 1:
        for key in ("microbatches", "pp_schedule", "virtual_stages"):
            if parallelism.get(key):
                raise Unsupported(f"parallelism.{key} works with a pipeline only: set pp_size, or remove it")
        return SCHEDULES[0], 1
    schedule = schedule or ("interleaved" if int(virtual or 1) > 1 else SCHEDULES[0])
    if schedule not in SCHEDULES:
        raise Unsupported(f"there is no pp_schedule {schedule}; there are {', '.join(SCHEDULES)}")
    virtual = int(virtual or (2 if schedule == "interleaved" else 1))
    if (schedule == "interleaved") != (virtual > 1):
        raise Unsupported(
            f"pp_schedule {schedule} with virtual_stages {virtual}: virtual_stages above 1 works "
            "with pp_schedule: interleaved only"
        )
    return schedule, virtual
