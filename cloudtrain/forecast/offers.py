"""Machine types that a price list or a platform's table has, with GPUs, memory and price, for a person to choose from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends import machines, registry
from cloudtrain.backends.machines import Machine
from cloudtrain.forecast import prices


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
    spot: Sequence[float] | None = None  # lowest and highest of 30 days


def machines_of(provider: str) -> dict[str, Machine]:
    """Return the machine types of a price list's provider that a platform's table has, by their names in the list."""
    kind = registry.priced_by(provider)
    if kind is None or kind.traits.machines is None:
        return {}
    prefix = "" if kind.name == provider else kind.traits.machine_prefix
    return {machines.priced_name(each).removeprefix(prefix): each for each in machines.read(kind.traits.machines)}


def of_list(home: Path, name: str) -> Iterator[MachineOffer]:
    """Yield the machine types of a list and, where it is a platform's own, of its table; blocking (small files)."""
    provider = name.split("/")[0]
    kind = registry.priced_by(provider)
    known = machines_of(provider)
    stored = prices.load(home, name)
    listed = prices.machines_of(name) | (set(stored.usd_per_hour) if stored else set())
    shipped = kind is not None and kind.name == provider
    for machine in sorted(listed | set(known) if shipped else listed):
        yield _offer(home, name, machine, known.get(machine), shipped)


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
        spot=price.get("spot"),
    )
