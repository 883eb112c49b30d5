"""Read price lists: what all readers share, and SkyPilot's catalogue, which has prices of many providers.

What is not certain is left out: a machine type with two prices, a unit that is not an hour, a part without a price.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from cloudtrain.errors import BackendError

MOST = 20_000  # machine types of a list
HIGHEST_USD = 10_000.0  # of one machine and hour; what costs more is an error of the list
# github.com/skypilot-org/skypilot-catalog, written every seven hours (2026-11-23). It has no licence: read, never shipped.
CATALOGUED = ("aws", "gcp", "runpod")  # its providers whose lists can be read
SKYPILOT = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"


class BadList(BackendError):
    """An answer is not the price list that it should be."""


class Offer(NamedTuple):
    """Prices of one machine by its type, whose list they are from, what estimates are derived from, and prices of spot ones."""

    usd_per_hour: dict[str, float]
    source: str
    url: str
    estimate: str = ""
    spot: Mapping[str, float] = {}


class Downloads(Protocol):
    """Reads addresses: cloudtrain.forecast.download. Its calls block, and raise BackendError or Unreachable."""

    def lines(self, url: str) -> Iterator[str]:
        """Yield the lines of a text."""
        ...

    def page(self, url: str, headers: Mapping[str, str]) -> Any:
        """Return the value of a JSON text."""
        ...


def is_price(usd: object) -> bool:
    """Return whether a number can be the price of a machine for an hour."""
    return isinstance(usd, int | float) and not isinstance(usd, bool) and 0 < usd < HIGHEST_USD


class Catalogue(NamedTuple):
    """On-demand prices of a region in SkyPilot's catalogue: of machines, and of GPUs that have rows of their own."""

    machines: dict[str, float]
    accelerators: dict[tuple[str, float], float]  # name, count
    url: str

    def offer(self) -> Offer:
        """Return the prices of the machines."""
        return Offer(self.machines, "SkyPilot's catalogue", self.url)


def read_catalogue(downloads: Downloads, provider: str, region: str) -> Catalogue:
    """Read the prices of a region from a file of SkyPilot's catalogue (catalogs/v8/<provider>/vms.csv).

    Zones of a region may differ; the highest counts.
    """
    found = Catalogue({}, {}, f"{SKYPILOT}/{provider}/vms.csv")
    for row in checked(csv.DictReader(downloads.lines(found.url))):
        try:
            if row["Region"] != region or not row["Price"]:
                continue
            usd = float(row["Price"])
            key: Any = row["InstanceType"] or (row["AcceleratorName"], float(row["AcceleratorCount"] or 0))
        except (KeyError, TypeError, ValueError) as error:
            raise BadList(f"the list has an unexpected row: {error!r}") from None
        table: dict[Any, float] = found.machines if row["InstanceType"] else found.accelerators
        if is_price(usd) and len(table) < MOST:
            table[key] = max(usd, table.get(key, 0.0))
    return found


def checked(rows: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows of a CSV file; raises BadList where they are none."""
    try:
        yield from rows
    except csv.Error as error:
        raise BadList(f"the list is not CSV: {error}") from None


class CertainPrices:
    """Prices by name; a name with two prices has none."""

    def __init__(self) -> None:
        self._found: dict[str, float | None] = {}

    def add(self, name: str, price: str | float) -> None:
        try:
            usd = float(price)
        except ValueError:
            raise BadList(f"the list has a price that is not a number: {str(price)[:40]!r}") from None
        if not is_price(usd) or not name or len(name) > 100 or len(self._found) >= MOST:
            return
        self._found[name] = usd if self._found.get(name, usd) == usd else None

    def certain(self) -> dict[str, float]:
        """Return the names that have one price."""
        return {name: usd for name, usd in self._found.items() if usd is not None}
