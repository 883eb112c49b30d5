"""The catalogue of machine types: what a platform's machines have, and the one that a job's resources ask for.

The tables lie in machines/<platform>.csv; the lines that begin with # in them say where and when they come from. A type
that a table does not know may still exist: platforms bring new ones faster than packages.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.sections import Resources

FOLDER = Path(__file__).parent
# What a job that asks for no accelerator, cores or memory gets at least: torch and a small model need that much.
SMALLEST_CPUS, SMALLEST_MEMORY_GB = 4, 16.0
_OWN = ("machine", "accelerator", "accelerators", "accelerator_memory_gb", "vcpus", "memory_gb", "usd_per_hour",
        "price_date", "price_source")  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """One machine type; memory in GB (of an accelerator, of the machine), price in USD for an hour on demand."""

    name: str
    accelerator: str  # as in a job file: A100-80GB; "" without
    accelerators: int
    accelerator_memory_gb: float
    vcpus: int
    memory_gb: float
    usd_per_hour: float | None = None
    price_date: str = ""
    price_source: str = ""
    more: Mapping[str, str] = field(default_factory=dict, compare=False)  # further columns of this platform

    @property
    def price(self) -> dict[str, Any] | None:
        """What a plan says about the price of one machine, None where it is not known."""
        if self.usd_per_hour is None:
            return None
        return {"usd_per_hour": self.usd_per_hour, "as_of": self.price_date, "source": self.price_source}


@cache
def load(platform: str) -> tuple[Machine, ...]:
    """Return a platform's machine types in the order of its table; blocking (one small file)."""
    with open(FOLDER / platform / "machines.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return tuple(
        Machine(
            name=row["machine"],
            accelerator=row["accelerator"],
            accelerators=int(row["accelerators"] or 0),
            accelerator_memory_gb=float(row["accelerator_memory_gb"] or 0),
            vcpus=int(row["vcpus"]),
            memory_gb=float(row["memory_gb"]),
            usd_per_hour=float(row["usd_per_hour"]) if row["usd_per_hour"] else None,
            price_date=row["price_date"],
            price_source=row["price_source"],
            more={name: text for name, text in row.items() if name not in _OWN},
        )
        for row in rows
    )


def named(table: Sequence[Machine], name: str) -> Machine | None:
    """Return the first machine type of that name, or None."""
    return next((machine for machine in table if machine.name == name), None)


def matches(asked: str, accelerator: str) -> bool:
    """Return whether an accelerator is what a job file asks for: A100 is any A100, A100-80GB that one only."""
    asked, accelerator = asked.lower(), accelerator.lower()
    return bool(accelerator) and (asked == accelerator or accelerator.startswith(f"{asked}-"))


def choose(table: Sequence[Machine], resources: Resources) -> Machine | Problem:
    """Return the smallest machine type with what a job asks for, or what is wrong with the wish.

    The number of accelerators is exact: ranks would otherwise see more of them than the job knows.
    """
    found = list(table)
    if resources.accelerator:
        found = [machine for machine in table if matches(resources.accelerator, machine.accelerator)]
        if not found:
            known = sorted({machine.accelerator for machine in table if machine.accelerator})
            said = f"{resources.accelerator} is no accelerator of this platform's catalogue"
            return Problem(said, "resources.accelerators", _near(resources.accelerator, known))
        counts = sorted({machine.accelerators for machine in found})
        found = [machine for machine in found if machine.accelerators == resources.gpus]
        if not found:
            said = f"no machine has {resources.gpus} x {resources.accelerator}"
            hint = f"there are machines with {', '.join(map(str, counts))}"
            return Problem(said, "resources.accelerators", hint)
    else:
        found = [machine for machine in table if not machine.accelerators]
    plain = not resources.accelerator
    cpus = resources.cpus or (SMALLEST_CPUS if plain else 0)
    memory_gb = resources.memory_bytes / 1e9 if resources.memory_bytes else (SMALLEST_MEMORY_GB if plain else 0)
    # A table's GB are what its vendor calls so, which are GiB: 64GB fit a machine of 64.
    fit = [machine for machine in found if machine.vcpus >= cpus and machine.memory_gb * 1.073741824 >= memory_gb]
    if not fit:
        largest = max(found, key=lambda machine: (machine.memory_gb, machine.vcpus))
        said = f"no machine with these accelerators has {cpus} cores and {memory_gb:g} GB"
        hint = f"the largest, {largest.name}, has {largest.vcpus} and {largest.memory_gb:g} GB"
        return Problem(said, "resources.cpus" if resources.cpus else "resources.memory", hint)
    return min(fit, key=lambda machine: (machine.accelerator_memory_gb, machine.vcpus, machine.memory_gb))


def _near(asked: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(asked.upper(), known, 1, 0.5)
    return (f"did you mean {near[0]}? " if near else "") + f"known are {', '.join(known)}"
