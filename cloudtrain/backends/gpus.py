"""GPUs of machines that no scheduler shares out: this one, and those behind SSH."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.errors import BadJob, Problem

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
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


def check_present(plan: Plan) -> None:
    """Raise BadJob where a plan asks for more GPUs than this machine shows; blocking (nvidia-smi)."""
    from cloudtrain.source.node_code import module

    count = plan.manifest["gpus_per_node"] * plan.manifest["nodes"]
    if count and (present := len(module("launcher.prepare.gpus").visible())) < count:
        shown = f"{present} GPUs" if present else "no GPU"
        named = plan.job["resources"]["accelerators"]
        message = f"is {named}, {count} GPUs in all, and this machine shows {shown} (nvidia-smi)"
        hint = "leave it out: the ranks see the GPUs that are there"
        raise BadJob([Problem(message, "resources.accelerators", hint)])
