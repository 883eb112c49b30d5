"""Prices of machine types: the lists that `cloudtrain prices refresh` has stored, and the shipped tables below them.

A list is one file, `<home>/prices/<provider>+<region>.json`. Reading one needs no network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    """

    name: str
    usd_per_hour: Mapping[str, float]
    source: str
    as_of: str
    estimate: str = ""
    url: str = ""


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
    prices = {str(name): usd for name, usd in data.pop("usd_per_hour").items() if is_price(usd)}
    return PriceList(usd_per_hour=prices, **data)


def stored_lists(home: Path) -> Iterator[PriceList]:
    """Yield the stored lists, by name."""
    for path in sorted((home / "prices").glob("*+*.json")):
        if found := load(home, path.stem.replace("+", "/", 1)):
            yield found


def price_of(backend: Backend, plan: Plan, job: Job, home: Path | None) -> dict[str, Any] | None:
    """Return the price of all nodes of a plan as `Plan.price` has it, None where it is not known.

    First comes the price that the job states, then the stored list of the machine's region, then the shipped table.
    Spot machines count at the on-demand price. Where the job states less than the known price, that one is there as
    `known_usd_per_hour`: a policy's max_cost asks for it.
    """
    resources, nodes = job.resources, job.num_nodes
    known = listed(backend.machine(plan), plan.price, nodes, home)
    price: dict[str, Any] | None
    if resources.usd_per_hour is not None:
        usd = round(resources.usd_per_hour * nodes, 4)
        price = {"usd_per_hour": usd, "as_of": "", "source": "resources.usd_per_hour"}
    elif resources.priced_as:
        price = listed(resources.priced_as, None, nodes, home)
    else:
        return known
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
    stored = load(home, f"{provider}/{region}") if home else None
    usd_of_one = stored.usd_per_hour.get(machine) if stored else None
    if stored and usd_of_one is not None and (not price or price.get("estimate") or price["as_of"] <= stored.as_of):
        price = {"usd_per_hour": round(usd_of_one * nodes, 6), "as_of": stored.as_of, "source": stored.source}
        price |= {"estimate": stored.estimate} if stored.estimate else {}
    return price | {"machine": f"{nodes} x {machine}, {region}"} if price else None


def age_days(as_of: str) -> int:
    """Return how many days ago a price was read; raises ValueError."""
    return max(0, (SYSTEM.utc().date() - date.fromisoformat(as_of)).days)


def describe_age(as_of: str) -> str:
    """Return how old a price is, with what to do where that is much."""
    days = age_days(as_of)
    text = "of today" if not days else f"{days} day{'s' * (days > 1)} old"
    return text + (": run cloudtrain prices refresh for a newer list" if days > OLD_DAYS else "")
