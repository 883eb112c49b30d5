"""Prices of Azure's machines in a region, from Azure's public list of retail prices.

Azure Machine Learning's machines have the prices of virtual machines (github.com/infracost/infracost/pull/2902, 2026-11-30).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from cloudtrain.backends.price_lists import BadList, CertainPrices, Downloads, Offer

# learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices (2026-11-30): fields, filters, pages
AZURE = "https://prices.azure.com"
MOST_PAGES = 200
_FIELDS = ("serviceName", "type", "unitOfMeasure", "currencyCode", "tierMinimumUnits")
_WANTED = ("Virtual Machines", "Consumption", "1 Hour", "USD", 0)


def read_prices(downloads: Downloads, region: str) -> Offer:
    """Read the prices of Linux machines in a region, on demand and as spot; blocking."""
    chosen = f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}' and priceType eq 'Consumption'"
    url = f"{AZURE}/api/retail/prices?api-version=2023-01-01-preview&meterRegion='primary'&$filter={quote(chosen)}"
    usual, spot = parse(_pages(downloads, url), region)
    return Offer(usual, "Azure's retail prices", url, spot=spot)


def _pages(downloads: Downloads, url: str) -> Iterator[Any]:
    """Yield the pages of the list. Of an address in an answer only the query is used."""
    for _ in range(MOST_PAGES):
        page = downloads.page(url, {})
        yield page
        query = str(page.get("NextPageLink") or "").partition("?")[2] if isinstance(page, dict) else ""
        if not query:
            return
        url = f"{AZURE}/api/retail/prices?{quote(query, safe='%$&=,+')}"
    raise BadList(f"Azure's list has more than {MOST_PAGES} pages")


def parse(pages: Iterable[Any], region: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the prices of Linux machines on demand, and as spot machines."""
    usual, spot = CertainPrices(), CertainPrices()
    for page in pages:
        try:
            for item in page["Items"]:
                product, sku = item["productName"], item["skuName"]
                if tuple(item[name] for name in _FIELDS) != _WANTED or item["armRegionName"] != region:
                    continue
                if "Windows" in product or "Cloud Services" in product or sku.endswith("Low Priority"):
                    continue
                (spot if sku.endswith("Spot") else usual).add(item["armSkuName"], item["retailPrice"])
        except (KeyError, TypeError, AttributeError) as error:
            raise BadList(f"the list has an unexpected entry: {error!r}") from None
    return usual.certain(), spot.certain()
