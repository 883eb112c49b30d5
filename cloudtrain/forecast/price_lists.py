"""Read the price lists of AWS, Google and SkyPilot's catalogue: text in, prices by machine type out.

What is not certain is left out: a machine type with two prices, a unit that is not an hour, a part without a price.
AWS's list is read as CSV rather than JSON: a row has product and price together, so that one row is in memory at a time.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cloudtrain.backends import machines
from cloudtrain.errors import BackendError
from cloudtrain.forecast.prices import is_price

MOST = 20_000  # machine types of a list
# Vertex AI's on-demand price of a machine is this many times Compute Engine's: billed SKUs of N1, H100, A3 core and RAM
# (zenn.dev/google_cloud_jp/articles/dws-flex-new-skus, 2025-08-16; Google's price page, 2026-10-07). Others: not checked.
VERTEX_FACTOR = 1.15
_GPU_FAMILIES = (
    "a2-",
    "a3-",
    "a4-",
    "a4x-",
    "g2-",
    "g4-",
)  # of Compute Engine; the price of a VM there is without its GPUs
_SKU = re.compile(r"Vertex AI: Training/Pipelines on (.+?)(?: running)? in [^,]+", re.IGNORECASE)
_NOISE = {"predefined", "instance", "nvidia", "tesla", "gpu"}


class BadList(BackendError):
    """An answer is not the price list that it should be."""


class Offer(NamedTuple):
    """Prices by machine type, and the version of the list, "" where it has none."""

    usd_per_hour: dict[str, float]
    version: str = ""


def read_sagemaker(lines: Iterable[str], region: str) -> Offer:
    """Return the on-demand prices of training from SageMaker's regional offer file (CSV).

    Five rows of metadata come before the header (docs.aws.amazon.com, "Reading the service price list file", 2026-11-23).
    """
    version, prices = "", _Prices()
    rows = csv.reader(lines)
    header: list[str] = []
    for number, row in enumerate(_checked(rows)):
        if header:
            if len(row) != len(header):
                raise BadList(f"row {number + 1} of the list has {len(row)} fields instead of {len(header)}")
            entry = dict(zip(header, row, strict=True))
            wanted = ("Training", "OnDemand", "Hrs", "USD", region)
            if tuple(entry[name] for name in _COLUMNS) == wanted:
                prices.add(entry["Instance Name"], entry["PricePerUnit"])
        elif row[:1] == ["SKU"]:
            header = row
            if missing := {*_COLUMNS, "Instance Name", "PricePerUnit"} - {*header}:
                raise BadList(f"the list has no column {', '.join(sorted(missing))}")
        elif row[:1] == ["Version"] and len(row) > 1:
            version = row[1][:40]
        elif number > 20:
            raise BadList("the list does not begin as a price list of AWS")
    return Offer(prices.certain(), version)


_COLUMNS = ("Component", "TermType", "Unit", "Currency", "Region Code")


def read_catalogue(lines: Iterable[str], region: str, provider: str) -> Offer:
    """Return the on-demand prices of a region from a file of SkyPilot's catalogue (catalogs/v8/<provider>/vms.csv).

    Zones of a region may differ; the highest counts. Of Google's machines GPUs have rows of their own.
    """
    virtual_machines: dict[str, float] = {}
    accelerators: dict[tuple[str, float], float] = {}
    for row in _checked(csv.DictReader(lines)):
        try:
            if row["Region"] != region or not row["Price"]:
                continue
            usd = float(row["Price"])
            key: Any = row["InstanceType"] or (row["AcceleratorName"], float(row["AcceleratorCount"] or 0))
        except (KeyError, TypeError, ValueError) as error:
            raise BadList(f"the list has an unexpected row: {error!r}") from None
        table: dict[Any, float] = virtual_machines if row["InstanceType"] else accelerators
        if is_price(usd) and len(table) < MOST:
            table[key] = max(usd, table.get(key, 0.0))
    if provider != "gcp":
        return Offer(virtual_machines)
    prices = {name: usd for name, usd in virtual_machines.items() if not name.startswith(_GPU_FAMILIES)}
    for machine in machines.load("vertex"):
        gpu = re.sub(r"-(40GB|16GB)$", "", machine.accelerator)  # A100 is the one of 40 GB there
        usd_of_gpus = accelerators.get((gpu, float(machine.accelerators)))
        if machine.name in virtual_machines and usd_of_gpus:
            prices[machines.priced_name(machine)] = round(virtual_machines[machine.name] + usd_of_gpus, 6)
    return Offer(prices)


def estimate_vertex(compute_engine: Mapping[str, float]) -> Offer:
    """Return estimates for Vertex AI from Compute Engine's prices."""
    names = {machines.priced_name(machine) for machine in machines.load("vertex")}
    return Offer({name: round(usd * VERTEX_FACTOR, 6) for name, usd in compute_engine.items() if name in names})


def read_vertex(pages: Iterable[Any], region: str) -> Offer:
    """Return the on-demand prices of custom training from the pages of Google's Billing Catalog.

    A machine is the sum of its cores, memory and GPUs. The management fee is in these SKUs and is not added again.
    """
    parts = _Prices()
    for page in pages:
        try:
            for sku in page.get("skus", ()):
                match = _SKU.fullmatch(sku["description"])
                if match and region in sku["serviceRegions"] and sku["category"]["usageType"] == "OnDemand":
                    for unit, usd in _rates(sku["pricingInfo"]):
                        words = [word for word in match[1].lower().split() if word not in _NOISE]
                        if unit == ("GiBy.h" if words[-1:] == ["ram"] else "h"):
                            parts.add(" ".join(words), usd)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadList(f"the catalogue has an unexpected entry: {error!r}") from None
    usd_of = parts.certain()
    prices = {}
    for machine in machines.load("vertex"):
        family = machine.name.partition("-")[0]
        if family == "a3" and not machine.name.startswith("a3-high"):
            continue  # mega and ultra: their SKUs are not known
        core, ram = usd_of.get(f"{family} core"), usd_of.get(f"{family} ram")
        gpu = usd_of.get(_short(machine.accelerator)) or usd_of.get(_long(machine)) if machine.accelerators else 0.0
        if core is not None and ram is not None and gpu is not None:
            usd = core * machine.vcpus + ram * machine.memory_gb + gpu * machine.accelerators
            prices[machines.priced_name(machine)] = round(usd, 6)
    return Offer(prices)


def _short(accelerator: str) -> str:
    """Return an accelerator's name as a SKU may have it: h100, a100 80gb."""
    return re.sub(r"-(40gb|16gb)$", "", accelerator.lower()).replace("-", " ")


def _long(machine: machines.Machine) -> str:
    """Return it with its memory: h100 80gb."""
    return f"{machine.accelerator.lower().partition('-')[0]} {machine.accelerator_memory_gb:g}gb"


def _rates(pricing: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield unit and price of a SKU, as far as it has exactly one price in USD."""
    for info in pricing[-1:]:
        expression = info["pricingExpression"]
        found = [rate["unitPrice"] for rate in expression["tieredRates"]]
        amounts = [int(unit.get("units") or 0) + int(unit.get("nanos") or 0) / 1e9 for unit in found]
        positive = [usd for usd in amounts if usd > 0]
        if len(positive) == 1 and {unit.get("currencyCode") for unit in found} == {"USD"}:
            yield expression["usageUnit"], positive[0]


def _checked(rows: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows of a CSV file; raises BadList where they are none."""
    try:
        yield from rows
    except csv.Error as error:
        raise BadList(f"the list is not CSV: {error}") from None


class _Prices:
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
