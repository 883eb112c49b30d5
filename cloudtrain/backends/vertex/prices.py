"""Vertex AI's prices, from Google's Billing Catalog; without a key for it, estimates from Compute Engine's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from cloudtrain.backends import machines
from cloudtrain.backends.price_lists import BadList, CertainPrices, Downloads, Offer, read_catalogue

# https://cloud.google.com/billing/v1/how-tos/catalog-api; the service is Vertex AI (2026-11-23)
GOOGLE = "https://cloudbilling.googleapis.com"
SERVICE = "C7E2-9256-1C43"
PAGE_SIZE, MOST_PAGES = 1000, 100
# Vertex AI's on-demand price of a machine is this many times Compute Engine's: billed SKUs of N1, H100, A3 core and RAM
# (zenn.dev/google_cloud_jp/articles/dws-flex-new-skus, 2025-08-16; Google's price page, 2026-10-07). Others: not checked.
FACTOR = 1.15
# Of Compute Engine; the price of a VM in the catalogue is without its GPUs.
_GPU_FAMILIES = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-")
_SKU = re.compile(r"Vertex AI: Training/Pipelines on (.+?)(?: running)? in [^,]+", re.IGNORECASE)
_NOISE = {"predefined", "instance", "nvidia", "tesla", "gpu"}


def read_prices(downloads: Downloads, region: str, key: str) -> Offer:
    """Read the on-demand prices of custom training in a region, with a key of Google's API or as estimates; blocking."""
    if key:
        url = f"{GOOGLE}/v1/services/{SERVICE}/skus?currencyCode=USD&pageSize={PAGE_SIZE}"
        return Offer(parse(_pages(downloads, url, key), region), "Google's Billing Catalog", url)
    offer = read_compute_engine(downloads, region)
    names = {machines.priced_name(machine) for machine in machines.load("vertex")}
    prices = {name: round(usd * FACTOR, 6) for name, usd in offer.usd_per_hour.items() if name in names}
    return offer._replace(usd_per_hour=prices, estimate=f"{FACTOR} times Compute Engine's price")


def read_compute_engine(downloads: Downloads, region: str) -> Offer:
    """Read Compute Engine's prices from SkyPilot's catalogue, where GPUs have rows of their own; blocking."""
    found = read_catalogue(downloads, "gcp", region)
    prices = {name: usd for name, usd in found.machines.items() if not name.startswith(_GPU_FAMILIES)}
    for machine in machines.load("vertex"):
        gpu = re.sub(r"-(40GB|16GB)$", "", machine.accelerator)  # A100 is the one of 40 GB there
        usd_of_gpus = found.accelerators.get((gpu, float(machine.accelerators)))
        if machine.name in found.machines and usd_of_gpus:
            prices[machines.priced_name(machine)] = round(found.machines[machine.name] + usd_of_gpus, 6)
    return found.offer()._replace(usd_per_hour=prices)


def _pages(downloads: Downloads, url: str, key: str) -> Iterator[Any]:
    """Yield the pages of Google's catalogue; the key goes in a header, so that no address has it."""
    token = ""
    for _ in range(MOST_PAGES):
        page = downloads.page(url + (f"&pageToken={quote(token, safe='')}" if token else ""), {"X-Goog-Api-Key": key})
        yield page
        token = str(page.get("nextPageToken") or "") if isinstance(page, dict) else ""
        if not token:
            return
    raise BadList(f"Google's catalogue has more than {MOST_PAGES} pages")


def parse(pages: Iterable[Any], region: str) -> dict[str, float]:
    """Return the on-demand prices of custom training from the pages of Google's Billing Catalog.

    A machine is the sum of its cores, memory and GPUs. The management fee is in these SKUs and is not added again.
    """
    parts = CertainPrices()
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
    return prices


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
