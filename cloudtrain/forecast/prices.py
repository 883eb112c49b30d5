"""Prices of machine types: the lists that `cloudtrain prices refresh` has stored, and the shipped lists below them.

A stored list is one file, `<home>/prices/<provider>+<region>.json`; shipped ones are cloudtrain/backends/*/prices.csv,
beside the prices in machines.csv. Reading one needs no network.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.backends import registry
from cloudtrain.backends.price_lists import CATALOGUED, is_price
from cloudtrain.clock import SYSTEM

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.job.job import Job

OLD_DAYS = 30


@dataclass(frozen=True)
class PriceList:
    """On-demand prices of one provider in one region, as they were read.

    Attributes:
        name: provider/region.
        usd_per_hour: machine type -> price of one machine.
        source: whose list it is, with its version where it has one.
        as_of: the day on which it was read (UTC, ISO 8601).
        estimate: what the prices are derived from; "" for those of the list itself.
        url: where it was read.
        spot: machine type -> price of one spot machine, where the list has it.
    """

    name: str
    usd_per_hour: Mapping[str, float]
    source: str
    as_of: str
    estimate: str = ""
    url: str = ""
    spot: Mapping[str, float] = field(default_factory=dict)


class Shipped(NamedTuple):
    """What a shipped list has on one machine; `note` says what its price is derived from, or why it has none."""

    usd_per_hour: float | None
    spot: tuple[float, float] | None  # lowest, highest
    source: str  # one word
    as_of: str
    url: str  # with its licence
    note: str


@cache
def shipped() -> tuple[dict[str, dict[str, Shipped]], dict[str, str]]:
    """Return the shipped lists by provider/region, and the region of each provider that has all machines."""
    from cloudtrain.backends import machines

    lists: dict[str, dict[str, Shipped]] = {}
    homes: dict[str, str] = {}
    for table in machines.TABLES:
        lines = (machines.FOLDER / table / "prices.csv").read_text("utf-8").splitlines()
        head = dict(line[2:].split(": ", 1) for line in lines if re.match(r"# \w+: ", line))
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            as_of, _, url = head.get(row["source"], "").partition(", ")
            spot = (float(row["spot_low"]), float(row["spot_high"])) if row["spot_low"] else None
            usd = float(row["usd_per_hour"]) if row["usd_per_hour"] else None
            entry = Shipped(usd, spot, row["source"], as_of, url, row["note"])
            lists.setdefault(row["list"], {})[row["machine"]] = entry
            homes[row["list"].partition("/")[0]] = head["home"]
    return lists, homes


def built_in(name: str, machine: str) -> Shipped | None:
    """Return what the shipped list of provider/region has on a machine, None for a machine that no list has.

    Without a row of that region it is the home region's price, times the region's highest factor where one is known.
    """
    lists, homes = shipped()
    provider, _, region = name.partition("/")
    own, home = lists.get(name, {}), homes.get(provider, "")
    found = own.get(machine) or lists.get(f"{provider}/{home}", {}).get(machine)
    if found is None or machine in own or region == home or found.usd_per_hour is None:
        return found
    factor = own["*"].usd_per_hour or 1.0 if "*" in own else 1.0
    about = f"{factor:g} x the price of {home}" if "*" in own else f"the price of {home}"
    usd = round(found.usd_per_hour * factor, 6)
    return found._replace(usd_per_hour=usd, spot=None, note="; ".join(filter(None, (found.note, about))))


def machines_of(name: str) -> set[str]:
    """Return the machines that the shipped list of provider/region has a price or a reason for; empty without a list."""
    lists, homes = shipped()
    provider = name.partition("/")[0]
    return {*lists[name], *lists[f"{provider}/{homes[provider]}"]} - {"*"} if name in lists else set()


def describe_none(backend: Backend, plan: Plan) -> str:
    """Return for which machine no price is known, and why; "" where the machines are one's own."""
    named = backend.machine(plan) if plan.request else ""
    if not named:
        return ""
    provider, region, machine = named.split("/", 2)
    found = built_in(f"{provider}/{region}", machine)
    return f"no price for {machine} in {region}: {found.note if found else 'no list that cloudtrain comes with has it'}"


def providers() -> list[str]:
    """Return the providers of price lists: backends with prices, those that they rent from, and those of the catalogue."""
    priced = [kind for kind in registry.loaded() if kind.traits.prices]
    return sorted({*CATALOGUED, *(kind.name for kind in priced), *(kind.traits.rents or kind.name for kind in priced)})


def file_of(home: Path, name: str) -> Path:
    """Return the file of a list."""
    return home / "prices" / f"{name.replace('/', '+')}.json"


def load(home: Path, name: str) -> PriceList | None:
    """Return a stored list, None where there is none that can be read; blocking (one small file)."""
    path = file_of(home, name)
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, LookupError, ValueError, TypeError, AttributeError):  # a damaged file is no list
        return None


@cache
def _read(path: Path, _changed_ns: int) -> PriceList:
    data = json.loads(path.read_bytes())
    date.fromisoformat(data["as_of"])
    usual, spot = ({str(machine): usd for machine, usd in table.items() if is_price(usd)}
                   for table in (data.pop("usd_per_hour"), data.pop("spot", {})))  # fmt: skip
    return PriceList(usd_per_hour=usual, spot=spot, **data)


def stored_lists(home: Path) -> Iterator[PriceList]:
    """Yield the stored lists, by name."""
    for path in sorted((home / "prices").glob("*+*.json")):
        if found := load(home, path.stem.replace("+", "/", 1)):
            yield found


def price_of(backend: Backend, plan: Plan, job: Job, home: Path | None) -> dict[str, Any] | None:
    """Return the price of all nodes of a plan as `Plan.price` has it, None where it is not known.

    First comes the price that the job states, then the stored list of the machine's region, then the shipped ones. A
    platform without prices of its own has those of the nodes that the job names. Spot machines count at the on-demand
    price; their own is there as `spot`. Where the job states less than the known price, that one is there as
    `known_usd_per_hour`: a policy's max_cost asks for it.
    """
    resources, nodes = job.resources, plan.machines
    known = listed(backend.machine(plan), plan.price, nodes, home)
    price: dict[str, Any] | None
    if resources.usd_per_hour is not None:
        usd = round(resources.usd_per_hour * nodes, 4)
        price = {"usd_per_hour": usd, "as_of": "", "source": "resources.usd_per_hour"}
    elif resources.priced_as:
        price = listed(resources.priced_as, None, nodes, home)
    else:
        return known or (None if backend.traits.prices else _of_node(job, home))
    if price and known and known["usd_per_hour"] > price["usd_per_hour"]:
        price["known_usd_per_hour"] = known["usd_per_hour"]
    return price


def listed(named: str, shipped: Mapping[str, Any] | None, nodes: int, home: Path | None) -> dict[str, Any] | None:
    """Return the price of machines `provider/region/machine`, or the shipped one where it is newer or nothing is named."""
    if not named:
        return dict(shipped) if shipped else None
    provider, region, machine = named.split("/", 2)
    price = dict(shipped) if shipped else None
    home_region = registry.traits(provider).prices
    if price and region != home_region:
        price["estimate"] = f"the price of {home_region}"
    own = built_in(f"{provider}/{region}", machine)
    if own and own.usd_per_hour is not None and (not price or price.get("estimate")):
        usd = round(own.usd_per_hour * nodes, 6)
        price = {"usd_per_hour": usd, "as_of": own.as_of, "source": own.source, "url": own.url}
        price |= {"estimate": own.note} if own.note else {}
    stored = load(home, f"{provider}/{region}") if home else None
    usd_of_one = stored.usd_per_hour.get(machine) if stored else None
    if stored and usd_of_one is not None and (not price or price.get("estimate") or price["as_of"] <= stored.as_of):
        price = {"usd_per_hour": round(usd_of_one * nodes, 6), "as_of": stored.as_of, "source": stored.source}
        price |= {"estimate": stored.estimate} if stored.estimate else {}
    if price and stored and machine in stored.spot:
        price |= {"spot": [round(stored.spot[machine] * nodes, 6)] * 2, "spot_as_of": stored.as_of}
    elif price and own and own.spot:
        price |= {"spot": [round(usd * nodes, 6) for usd in own.spot], "spot_as_of": own.as_of}
    return price | {"machine": f"{nodes} x {machine}, {region}"} if price else None


def _of_node(job: Job, home: Path | None) -> dict[str, Any] | None:
    """Return the price of nodes of the type that a job names, where a list has that type; its region is a guess."""
    wanted, gpus = job.resources.instance_type, job.resources.gpus
    lists, homes = shipped() if wanted else ({}, {})
    for provider, region in homes.items():
        names = lists[f"{provider}/{region}"]
        attached = [name for name in names if name.startswith(f"{wanted}+")] if gpus else []
        gpu = f"_{(job.resources.accelerator or '').partition('-')[0].upper()}:{gpus}"
        fitting = [name for name in attached if name.endswith(gpu)] if attached else [wanted] if wanted in names else []
        if fitting and (price := listed(f"{provider}/{region}/{fitting[0]}", None, job.num_nodes, home)):
            return price | {"estimate": f"a node's price in {region}, which the cluster may not be in"}
    return None


def age_days(as_of: str) -> int:
    """Return how many days ago a price was read; raises ValueError."""
    return max(0, (SYSTEM.utc().date() - date.fromisoformat(as_of)).days)


def describe_age(as_of: str) -> str:
    """Return how old a price is, with what to do where that is much."""
    days = age_days(as_of)
    text = "of today" if not days else f"{days} day{'s' * (days > 1)} old"
    return text + (": run cloudtrain prices refresh for a newer list" if days > OLD_DAYS else "")
