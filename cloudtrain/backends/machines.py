"""The catalog of machine types (accelerators, cores, memory, price), and the choice of one for a job's resources.

The tables are <platform>/machines.csv; lines that begin with # name source and date. A type that is missing in a table may
still exist: platforms add new ones faster than packages.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job
    from cloudtrain.job.sections import Resources

FOLDER = Path(__file__).parent
TABLES = tuple(sorted(path.parent.name for path in FOLDER.glob("*/machines.csv")))
# Accelerators that no table has, and their memory in GB: products of NVIDIA and AMD, by their data sheets (2026-11).
OTHERS = {
    "A2": 16, "A10": 24, "A16": 16, "A30": 24, "A40": 48, "A800": 80, "GB300": 279, "GH200": 96, "H20": 96, "H100-NVL": 94,
    "H200-NVL": 141, "H800": 80, "L2": 24, "L20": 48, "L40": 48, "P40": 24, "M60": 8, "A4000": 16, "A5000": 24, "A6000": 48,
    "6000": 48, "8000": 48, "MI100": 32, "MI210": 64, "MI250": 128, "MI250X": 128, "MI300A": 128, "MI300X": 192,
    "MI325X": 256, "MI350X": 288, "MI355X": 288,
}  # fmt: skip
# The minimum for a job without an accelerator that requests no cores or memory: torch and a small model need this.
SMALLEST_CPUS, SMALLEST_MEMORY_GB = 4, 16.0
_OWN = ("machine", "accelerator", "accelerators", "accelerator_memory_gb", "vcpus", "memory_gb", "usd_per_hour",
        "price_date", "price_source")  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """One machine type; memory in GB (per accelerator, and of the machine), on-demand price in USD per hour."""

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
        """The price of one machine as in a plan, None if it is unknown."""
        if self.usd_per_hour is None:
            return None
        return {"usd_per_hour": self.usd_per_hour, "as_of": self.price_date, "source": self.price_source}


def load(platform: str) -> tuple[Machine, ...]:
    """Return a platform's machine types in the order of its table; blocking (one small file)."""
    return read(FOLDER / platform / "machines.csv")


@cache
def read(path: Path) -> tuple[Machine, ...]:
    """Return the machine types of a table; blocking (one small file)."""
    with open(path, encoding="utf-8", newline="") as file:
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


def find_machine(table: Sequence[Machine], name: str) -> Machine | None:
    """Return the first machine type of that name, or None."""
    return next((machine for machine in table if machine.name == name), None)


def find_node(name: str) -> Machine | None:
    """Return the machine type of a node by the cloud's own name (g5.xlarge), with the fewest GPUs where it has several."""
    found = [
        machine
        for table in TABLES
        for machine in load(table)
        if name in (machine.name, machine.name.removeprefix("ml."))
    ]
    return min(found, key=lambda machine: machine.accelerators, default=None)


def with_gpus(job: Job, machine: Machine | None) -> tuple[Job, list[str]]:
    """Return a job that names only a machine type with that machine's GPUs, from which its ranks follow, and a note on it."""
    if machine is None or not machine.accelerators or job.resources.accelerators:
        return job, []
    gpus = f"{machine.accelerator}:{machine.accelerators}"
    job = job.replace(resources=job.resources.model_copy(update={"accelerators": gpus}))
    return job, [f"{machine.name} has {gpus.replace(':', ' x ')}: {job.processes} ranks run on each node"]


def with_gpus_of(job: Job, role: str, machine: Machine | None) -> Job:
    """Return a job of which a service names only a machine type, with that machine's GPUs."""
    own = job.roles[role].resources
    if own is None or machine is None or not machine.accelerators or own.accelerators:
        return job
    own = own.model_copy(update={"accelerators": f"{machine.accelerator}:{machine.accelerators}"})
    return job.replace(roles={**job.roles, role: job.roles[role].model_copy(update={"resources": own})})


def count_gpus(platform: str, counts: Iterable[tuple[str, int]]) -> int | None:
    """Return the GPUs of so many machines of each type, None where the catalog lacks one of the types."""
    total = 0
    for name, count in counts:
        machine = find_machine(load(platform), name)
        if machine is None:
            return None
        total += machine.accelerators * count
    return total


def priced_name(machine: Machine) -> str:
    """Return a machine type's name in a price list; GPUs that are attached to it (N1 of Google) are in the name."""
    if machine.accelerators and machine.name.startswith("n1-"):
        return f"{machine.name}+{machine.more['accelerator_type']}:{machine.accelerators}"
    return machine.name


def matches(requested: str, accelerator: str) -> bool:
    """Return whether an accelerator matches a job file's: A100 matches any A100, A100-80GB only that one."""
    requested, accelerator = requested.lower(), accelerator.lower()
    return bool(accelerator) and (requested == accelerator or accelerator.startswith(f"{requested}-"))


def choose(table: Sequence[Machine], resources: Resources, nodes: int = 1) -> Machine | Problem:
    """Return the smallest machine type that has a job's resources, or the problem with the request of so many nodes.

    The number of accelerators must match exactly: otherwise ranks would see more of them than the job expects.
    """
    candidates = list(table)
    if resources.accelerator:
        candidates = [machine for machine in table if matches(resources.accelerator, machine.accelerator)]
        if not candidates:
            message = f"{resources.accelerator} is not an accelerator that this platform offers"
            return Problem(message, "resources.accelerators", _suggest(resources.accelerator, table))
        counts = sorted({machine.accelerators for machine in candidates})
        candidates = [machine for machine in candidates if machine.accelerators == resources.gpus]
        if not candidates:
            message = f"no machine has {resources.gpus} x {resources.accelerator}"
            hint = f"there are machines with {', '.join(map(str, counts))}"
            if more := next((count for count in counts if resources.gpus and count % resources.gpus == 0), 0):
                share = more // resources.gpus
                fewer = "num_nodes: 1" if nodes <= share else f"num_nodes: {-(-nodes // share)}"
                hint += f": write {resources.accelerator}:{more} with {fewer}"
            return Problem(message, "resources.accelerators", hint)
    else:
        candidates = [machine for machine in table if not machine.accelerators]
    cpu_only = not resources.accelerator
    cpus = resources.cpus or (SMALLEST_CPUS if cpu_only else 0)
    memory_gb = resources.memory_bytes / 1e9 if resources.memory_bytes else (SMALLEST_MEMORY_GB if cpu_only else 0)
    # A vendor's GB are GiB: a job with 64GB fits a machine with 64.
    fitting = [
        machine for machine in candidates if machine.vcpus >= cpus and machine.memory_gb * 1.073741824 >= memory_gb
    ]
    if not fitting:
        largest = max(candidates, key=lambda machine: (machine.memory_gb, machine.vcpus))
        message = f"no machine with these accelerators has {cpus} cores and {memory_gb:g} GB"
        hint = f"the largest, {largest.name}, has {largest.vcpus} and {largest.memory_gb:g} GB"
        return Problem(message, "resources.cpus" if resources.cpus else "resources.memory", hint)
    return min(fitting, key=lambda machine: (machine.accelerator_memory_gb, machine.vcpus, machine.memory_gb))


def similar_accelerator(name: str) -> str:
    """Return the known GPU that a name is probably a mistyped form of; "" where it is known, or nothing is near.

    Clusters have GPUs that no table of ours has, so an unknown name is no error.
    """
    from difflib import get_close_matches

    known = {machine.accelerator for table in TABLES for machine in load(table) if machine.accelerator} | set(OTHERS)
    plain = _plain(name)
    short = {re.sub(r"-(\d+GB|MEGA)$", "", each) for each in known}
    if any(matches(plain, each) for each in known | short):
        return ""
    return next(iter(get_close_matches(plain.replace("O", "0"), sorted(known | short), 1, 0.75)), "")


def _plain(name: str) -> str:
    """Return an accelerator's name without its maker, its form and its memory."""
    return re.sub(r"^(NVIDIA|TESLA|RTX)-|-(SXM\d*|PCIE|NVL|\d+GB?)\b", "", name.upper())


def _suggest(name: str, table: Sequence[Machine]) -> str:
    """Return which accelerators a table has, and which of them is nearest: by memory and price, or a mistyped name."""
    from difflib import get_close_matches

    offered = {machine.accelerator: machine.accelerator_memory_gb for machine in table if machine.accelerators}
    elsewhere = [m.accelerator_memory_gb for each in TABLES for m in load(each) if matches(name, m.accelerator)]
    memory_gb = next(iter(elsewhere), OTHERS.get(name.upper()) or OTHERS.get(_plain(name)))
    closest = get_close_matches(name.upper(), offered, 1, 0.75)
    near = f"did you mean {closest[0]}? " if closest else ""
    if memory_gb and offered:
        usd = _usd_per_gpu(name)
        nearest = min(
            offered, key=lambda each: (abs(offered[each] - memory_gb), abs((_usd_per_gpu(each) or 1e6) - usd), each)
        )
        near = f"the nearest here is {nearest}, with {offered[nearest]:g} GB ({name} has {memory_gb:g} GB); "
    return f"{near}choose one of {', '.join(sorted(offered))}"


def _usd_per_gpu(name: str) -> float:
    """Return the lowest known price of one such accelerator an hour, on any platform; 0 where none is known."""
    priced = [m for each in TABLES for m in load(each) if m.usd_per_hour and matches(name, m.accelerator)]
    return min((machine.usd_per_hour or 0) / machine.accelerators for machine in priced) if priced else 0.0
