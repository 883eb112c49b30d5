"""Machine types that a price list or a platform's table has, with GPUs, memory and price, for a person to choose from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends import machines
from cloudtrain.backends.machines import Machine
from cloudtrain.forecast import prices

# The table that describes a provider's machines, and what its names begin with: AWS's g5.xlarge is SageMaker's ml.g5.xlarge.
_TABLES = {"sagemaker": ("sagemaker", ""), "vertex": ("vertex", ""), "aws": ("sagemaker", "ml."), "gcp": ("vertex", "")}


@dataclass(frozen=True)
class MachineOffer:
    """One machine type in one region; None where a fact is not known."""

    list: str  # provider/region
    machine: str
    gpu: str  # as in resources.accelerators; "" without
    gpus: int | None
    gpu_memory_gb: float | None  # of one GPU
    vcpus: int | None
    memory_gb: float | None
    usd_per_hour: float | None  # of one machine, on demand
    as_of: str
    source: str
    estimate: str  # what an estimated price is derived from; "" for an exact one


def of_list(home: Path, name: str) -> Iterator[MachineOffer]:
    """Yield the machine types of a list and, of SageMaker and Vertex AI, of the platform's table; blocking (small files)."""
    provider = name.split("/")[0]
    table, prefix = _TABLES.get(provider, ("", ""))
    known = {machines.priced_name(each).removeprefix(prefix): each for each in machines.load(table)} if table else {}
    stored = prices.load(home, name)
    listed = set(stored.usd_per_hour) if stored else set()
    for machine in sorted(listed | set(known) if provider in prices.SHIPPED else listed):
        yield _offer(home, name, machine, known.get(machine), provider in prices.SHIPPED)


def _offer(home: Path, name: str, machine: str, facts: Machine | None, shipped: bool) -> MachineOffer:
    """Return one machine type with the price that a plan would have."""
    price = prices.listed(f"{name}/{machine}", facts.price if facts and shipped else None, 1, home) or {}
    return MachineOffer(
        list=name,
        machine=machine,
        gpu=facts.accelerator if facts else "",
        gpus=facts.accelerators if facts else None,
        gpu_memory_gb=(facts.accelerator_memory_gb or None) if facts else None,
        vcpus=facts.vcpus if facts else None,
        memory_gb=facts.memory_gb if facts else None,
        usd_per_hour=price.get("usd_per_hour"),
        as_of=price.get("as_of", ""),
        source=price.get("source", ""),
        estimate=price.get("estimate", ""),
    )
