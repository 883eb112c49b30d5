"""What is wrong with a job's fields together, each of them right by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job


class Conflict(NamedTuple):
    """A problem between fields of a job; it says nothing when one of them is wrong by itself."""

    fields: tuple[str, ...]
    problem: Problem


def find_conflicts(job: Job) -> Iterator[Conflict]:
    """Yield what is wrong with fields together."""
    p, world = job.parallelism, job.world_size
    if job.min_nodes is not None and job.min_nodes > job.num_nodes:
        yield Conflict(
            ("min_nodes", "num_nodes"),
            Problem(f"is {job.min_nodes}, more than num_nodes, {job.num_nodes}", "min_nodes"),
        )
    size = ("num_nodes", "processes_per_node", "resources", "parallelism")
    if 0 < job.resources.gpus < job.processes:
        yield Conflict(
            ("processes_per_node", "resources"),
            Problem(
                f"is {job.processes}, but a node has {job.resources.gpus} accelerators",
                "processes_per_node",
                "leave it out for one process on each",
            ),
        )
    model = p.tp_size * p.pp_size * p.cp_size
    split = {key: getattr(p, key) for key in ("tp_size", "pp_size", "cp_size") if getattr(p, key) > 1}
    if world % model:
        words = " x ".join(f"{key} {value}" for key, value in split.items())
        yield Conflict(
            size,
            Problem(
                f"{words} does not divide the {world} processes of the job",
                "parallelism." + next(iter(split)),
                "num_nodes x processes_per_node is the number of processes",
            ),
        )
    else:
        replicas = (p.dp_replicate_size or 1) * (p.dp_shard_size or 1)
        both = p.dp_replicate_size is not None and p.dp_shard_size is not None
        if (both and replicas != world // model) or (world // model) % replicas:
            key = "dp_replicate_size" if p.dp_replicate_size is not None else "dp_shard_size"
            yield Conflict(
                size,
                Problem(
                    f"the sizes of data parallelism make {replicas}, the job has {world // model} ranks for it",
                    f"parallelism.{key}",
                    "leave one of them out",
                ),
            )
    if p.strategy == "none" and world > 1 and job.entrypoint is None and "strategy" in p.model_fields_set:
        yield Conflict(
            (*size, "entrypoint"),
            Problem(
                f"is none, but the shared trainer has {world} processes",
                "parallelism.strategy",
                "leave it out, or write ddp",
            ),
        )
    if job.entrypoint is None:
        yield from _shared_trainer(job)
    if p.accelerate_config and p.strategy not in ("none", "ddp"):
        yield Conflict(
            ("parallelism",),
            Problem(
                "stands beside accelerate_config, which says it too", "parallelism.strategy", "leave one of them out"
            ),
        )
    for name in sorted(job.secrets.keys() & job.env.keys()):
        yield Conflict(
            ("secrets", "env"), Problem("is given in env and in secrets", f"secrets.{name}", "keep one of them")
        )


def _shared_trainer(job: Job) -> Iterator[Conflict]:
    """Yield what the shared trainer would refuse on the node, whatever the model."""
    p, fields = job.parallelism, ("num_nodes", "processes_per_node", "resources", "parallelism", "entrypoint")
    if p.strategy.startswith("zero"):
        for key in ("tp_size", "pp_size", "cp_size"):
            if getattr(p, key) > 1:
                yield Conflict(
                    fields,
                    Problem(
                        f"is {getattr(p, key)}, but {p.strategy} goes without it", f"parallelism.{key}", "write fsdp"
                    ),
                )
    if p.pp_size == 1:
        for key in ("microbatches", "pp_schedule", "virtual_stages"):
            if getattr(p, key) is not None:
                yield Conflict(fields, Problem("belongs to a pipeline", f"parallelism.{key}", "set pp_size too"))
    if p.cp_size > 1 and p.pp_size > 1:
        yield Conflict(
            fields,
            Problem(f"is {p.cp_size}, which goes without pp_size", "parallelism.cp_size", "write fsdp, or tp_size"),
        )
    if p.offload and p.strategy in ("none", "ddp"):
        yield Conflict(
            fields, Problem(f"has nothing to move with {p.strategy}", "parallelism.offload", "write fsdp or zero3")
        )
