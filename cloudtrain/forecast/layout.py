"""Choose the parallelism of a training (`parallelism: auto`): what fits on its GPUs and is the fastest by the forecast of time.

What the job writes itself stays: `per_device_train_batch_size` and `gradient_checkpointing` too. The global batch stays in
any case, so that the losses do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadJob, Problem
from cloudtrain.forecast import devices, fit, speed, training
from cloudtrain.forecast.network import ETHERNET, GB, Band, pool
from cloudtrain.job.sections import Parallelism
from cloudtrain.source.node_code import module

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.forecast.memory import Step
    from cloudtrain.forecast.models import Shape
    from cloudtrain.forecast.training import Training
    from cloudtrain.job.job import Job

MOST = 64  # samples of a micro-batch
LIKE = 0.02  # times within that share are the same: the forecast is no better
ENOUGH = 16384  # tokens of a micro-batch; more make matrices no faster
_PEAK = 1e14  # FLOP/s of GPUs that no table has: only the order of the layouts depends on it
_CORE = 1e11  # of a rank without a GPU
_GBPS = 100.0  # of a network that no table has, likewise


@dataclass(frozen=True)
class Layout:
    """One way to spread a training over its ranks."""

    parallelism: dict[str, Any]
    step: Step
    seconds: float  # of an optimizer step, relative where the GPU is not known
    low: int  # bytes that a GPU needs, from and to
    high: int

    @property
    def described(self) -> str:
        """The layout in words: `fsdp, tp_size 2, micro-batch 4 x 2, checkpointing`."""
        sizes = [f"{key} {value}" for key, value in self.parallelism.items() if key != "strategy"]
        again = ["checkpointing"] if self.step.checkpointing else []
        batch = f"micro-batch {self.step.batch} x {self.step.accumulation}"
        return ", ".join([str(self.parallelism["strategy"]), *sizes, batch, *again])

    def key(self, best_s: float) -> tuple[int, int, int, int]:
        """Return by what layouts are sorted: time, how plain they are, a micro-batch of large matrices, memory."""
        tokens = self.step.batch * self.step.sequence // self.step.context
        like = int(math.log(self.seconds / best_s) / math.log(1 + LIKE))
        plain = 2 * len(self.parallelism) + (self.step.strategy not in ("none", "ddp"))
        return like, plain, -min(tokens, ENOUGH), self.high


def freeze(job: Job, plan: Plan | None = None, machine: str = "") -> tuple[Job, list[str]]:
    """Return the job with the parallelism that is chosen, and notes on the choice and its two runners-up.

    Args:
        job: a resolved job with `parallelism: auto`.
        plan: its plan, where the machine gives the number of ranks.
        machine: type of a node as provider/region/name; "" where it is not known.

    Raises:
        BadJob: the model's size or the memory of a rank is not known, or no layout is possible.
    """
    nodes = int(plan.manifest["nodes"]) if plan else job.num_nodes
    per_node = int(plan.manifest["processes_per_node"]) if plan else job.processes
    found, most = _asked(job, nodes, per_node)
    layouts = list(_layouts(job, found, nodes, per_node, machine))
    fitting = [layout for layout in layouts if layout.high <= most]
    if not layouts:
        raise _refused(
            job,
            "no layout divides the global batch over the ranks",
            "choose a global_batch_size that is divisible by the number of ranks",
        )
    if fitting:
        best_s = min(layout.seconds for layout in fitting)
        ordered = sorted(fitting, key=lambda layout: layout.key(best_s))
    else:
        ordered = sorted(layouts, key=lambda layout: (layout.high, layout.seconds))
    first = ordered[0]
    others = _unlike(ordered)
    notes = [f"parallelism auto: {first.described}; needs {_gib(first)} of {most / fit.GIB:.1f} GiB" + _why(fitting)]
    for layout in others:
        slower = f"{layout.seconds / first.seconds - 1:.0%} slower" if layout.seconds > first.seconds else "no faster"
        notes.append(f"next best layout: {layout.described}; needs {_gib(layout)} GiB, {slower}")
    notes += _out(layouts, most)
    return _frozen(job, first, found), notes


def _asked(job: Job, nodes: int, per_node: int) -> tuple[Training, int]:
    """Return the training as it is without a choice, and the memory of a rank in bytes."""
    found = training.of_job(job, {}, nodes * per_node, nodes)
    if isinstance(found, str) or found is None:
        raise _refused(job, found or "auto works with the shared trainer only", "write the strategy")
    gpu = job.resources.accelerator
    most = devices.size_bytes(gpu) if gpu else (job.resources.memory_bytes or 0) // per_node
    if not most:
        hint = "set resources.accelerators, or resources.memory for nodes without GPUs"
        raise _refused(job, f"the memory of {gpu or 'a rank'} is not known", hint)
    return found, most


def _layouts(job: Job, found: Training, nodes: int, per_node: int, machine: str) -> Iterator[Layout]:
    """Yield what is possible."""
    gpu = devices.named(job.resources.accelerator or "", devices.SIZES) or ""
    machines = pool(gpu, nodes, per_node, machine)
    if machines.network is None:
        machines = machines._replace(network=Band(*(share * _GBPS / 8 * GB for share in ETHERNET)))
    argv = job.argv()[1:]
    names = ("per_device_train_batch_size", "gradient_checkpointing")
    fixed = {name for name in names if name in job.hyperparameters or _is_written(name, argv)}
    world = nodes * per_node
    preview, arguments = module("trainer.preview"), module("trainer.arguments").parse(argv)
    for parallelism in _spreads(found.shape, world, nodes, per_node):
        if any(preview.refusals(arguments, parallelism, world, nodes)):
            continue
        plan = module("trainer.strategies.mesh").choose_plan(parallelism, world, nodes)
        if found.samples % plan.data_ranks:
            continue
        each = found.samples // plan.data_ranks
        for batch in [found.step.batch] if "per_device_train_batch_size" in fixed else range(1, min(each, MOST) + 1):
            if each % batch or (plan.pipeline > 1 and batch % plan.pipeline):
                continue
            for again in [found.step.checkpointing] if "gradient_checkpointing" in fixed else [False, True]:
                step = replace(
                    found.step, batch=batch, accumulation=each // batch, checkpointing=again, strategy=plan.strategy,
                    shards=plan.parts, tensor=plan.tensor, pipeline=plan.pipeline, context=plan.context,
                    chunked=found.step.chunked and plan.tensor * plan.pipeline == 1,
                )  # fmt: skip
                made = speed.of_step(found.shape, step, machines, plan.data_ranks, _PEAK if gpu else _CORE)
                low, high = fit.needed(training.spread(found, step, plan.data_ranks))
                assert made is not None
                yield Layout(parallelism, step, made.step.middle, low, high)


def _spreads(shape: Shape, world: int, nodes: int, per_node: int) -> Iterator[dict[str, Any]]:
    """Yield the sections `parallelism` that a model and a world have; not more tensor or context ranks than a node has."""
    powers = [1 << number for number in range(world.bit_length()) if 1 << number <= world]
    width = shape.queries // shape.heads
    for tensor in powers:
        if tensor > per_node or shape.heads % tensor or (shape.keys // width) % tensor:
            continue
        for pipeline in powers:
            for context in powers:
                each = tensor * pipeline * context
                if world % each or tensor * context > per_node or shape.layers % pipeline or (pipeline > 1 < context):
                    continue
                named = {"tp_size": tensor, "pp_size": pipeline, "cp_size": context}
                sizes = {key: value for key, value in named.items() if value > 1}
                data = world // each
                yield {"strategy": "ddp" if data > 1 else "none", **sizes}
                if data * context > 1:
                    yield {"strategy": "fsdp", **sizes}
                if nodes > 1 and data > nodes and data % nodes == 0:
                    yield {"strategy": "hsdp", "dp_replicate_size": nodes, **sizes}


def _unlike(ordered: list[Layout]) -> list[Layout]:
    """Return the two best layouts with another parallelism, or another checkpointing, than those before them."""
    seen: dict[str, Layout] = {}
    for layout in ordered:
        seen.setdefault(f"{layout.parallelism} {layout.step.checkpointing}", layout)
    return list(seen.values())[1:3]


def _why(fitting: list[Layout]) -> str:
    if not fitting:
        return ", the lowest of all layouts, but it may not fit"
    return f"; the fastest of {len(fitting)} layouts that fit"


def _out(layouts: list[Layout], most: int) -> Iterator[str]:
    """Yield why the plainest layout is out, where it needs more than there is."""
    plain = next((layout for layout in layouts if layout.parallelism["strategy"] in ("none", "ddp")), layouts[0])
    if plain.high > most:
        yield f"does not fit: {plain.described}; needs {_gib(plain)} GiB"


def _frozen(job: Job, layout: Layout, found: Training) -> Job:
    """Return the job as it would be written by hand."""
    hyperparameters = dict(job.hyperparameters)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"):
        hyperparameters.pop(name, None)
    argv = job.model_copy(update={"hyperparameters": hyperparameters}).argv()
    if not _is_written("per_device_train_batch_size", argv):
        hyperparameters["per_device_train_batch_size"] = str(layout.step.batch)
    if not _is_written("global_batch_size", argv) and not _is_written("global_batch_tokens", argv):
        hyperparameters["global_batch_size"] = str(found.samples)
    if layout.step.checkpointing and not _is_written("gradient_checkpointing", argv):
        hyperparameters["gradient_checkpointing"] = True
    chosen = Parallelism.model_validate(layout.parallelism)
    return job.model_copy(update={"parallelism": chosen, "hyperparameters": hyperparameters})


def _is_written(name: str, argv: list[str]) -> bool:
    words = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return name in words


def _gib(layout: Layout) -> str:
    return f"{layout.low / fit.GIB:.1f} to {layout.high / fit.GIB:.1f}"


def _refused(job: Job, message: str, hint: str) -> BadJob:
    return BadJob(job.located([Problem(f"parallelism: auto cannot choose a layout: {message}", "parallelism", hint)]))
