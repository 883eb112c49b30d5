"""GPUs of machines that no scheduler shares out: this one, and those behind SSH."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job


def chosen(job: Job, first_node: int = 0) -> str:
    """Return CLOUDTRAIN_GPUS of a node: numbers, "" for none, "all" for those that are there.

    `first_node` is how many nodes before this one are on the same machine.
    """
    if job.resources.accelerators is None:
        return "all"
    count = job.resources.gpus
    return ",".join(str(first_node * count + number) for number in range(count))


def notes(job: Job, where: str) -> list[str]:
    """Return the notes of a plan on which GPUs the ranks see of a job that asks for none."""
    if job.resources.accelerators == "0":
        return ["accelerators: 0 hides the GPUs: the ranks see none (resources.accelerators)"]
    if job.resources.accelerators:
        return []
    seen = f"the ranks see the GPUs of {where}, if it has one for each"
    return [f"no accelerators are named: {seen} (accelerators: 0 hides them)"]


def missing(job: Job) -> Problem | None:
    """Return the problem of a job that asks for more GPUs than this machine shows; blocking (nvidia-smi)."""
    count = job.resources.gpus * job.num_nodes
    if not count:
        return None
    from cloudtrain.source.node_code import module

    present = len(module("launcher.prepare.gpus").visible())
    if present >= count:
        return None
    shown = f"{present} GPUs" if present else "no GPU"
    message = f"is {job.resources.accelerators}, {count} GPUs in all, and this machine shows {shown} (nvidia-smi)"
    return Problem(message, "resources.accelerators", "leave it out: the ranks see the GPUs that are there")
