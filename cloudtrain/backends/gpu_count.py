"""Count the GPUs of a plan: of its machine types, or of what its job asks for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cloudtrain.backends import machines

if TYPE_CHECKING:
    from cloudtrain.backends.plan import Plan


def of_machines(platform: str, counts: Iterable[tuple[str, int]]) -> int | None:
    """Return the GPUs of so many machines of each type, None where the catalog lacks one of the types."""
    total = 0
    for name, count in counts:
        machine = machines.find_machine(machines.load(platform), name)
        if machine is None:
            return None
        total += machine.accelerators * count
    return total


def of_job(plan: Plan) -> int | None:
    """Return the GPUs that a job asks for on all nodes, None where its ranks use all those of the machines."""
    if (plan.job.get("resources") or {}).get("accelerators") is None:
        return None
    return int(plan.manifest["gpus_per_node"]) * int(plan.manifest["nodes"])
