"""Azure's retail prices: pages of the documented shape, made by hand (its page of documentation, 2026-11-30)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.azureml import prices
from cloudtrain.backends.price_lists import BadList
from cloudtrain.forecast import download, refresh
from cloudtrain.forecast import prices as lists

GPU = "Standard_NC24ads_A100_v4"


def item(usd: float, **changes: Any) -> dict[str, Any]:
    """Return an entry of the list as learn.microsoft.com/rest/api/cost-management/retail-prices shows it."""
    return {
        "currencyCode": "USD", "tierMinimumUnits": 0.0, "retailPrice": usd, "unitPrice": usd, "armRegionName": "eastus",
        "location": "US East", "effectiveStartDate": "2026-04-01T00:00:00Z", "meterId": "000009d0-057f-5f2b-b7e9-9e26add324a8",
        "meterName": "NC24ads A100 v4", "productId": "DZH318Z0BPVW", "skuId": "DZH318Z0BPVW/00QZ",
        "productName": "Virtual Machines NCads A100 v4 Series", "skuName": "Standard_NC24ads_A100_v4",
        "serviceName": "Virtual Machines", "serviceId": "DZH313Z7MMC8", "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour", "type": "Consumption", "isPrimaryMeterRegion": True, "armSkuName": GPU, **changes,
    }  # fmt: skip


ITEMS = [
    item(3.5),
    item(0.7, skuName="NC24ads A100 v4 Spot"),
    item(0.6, skuName="NC24ads A100 v4 Low Priority"),
    item(9.1, productName="Virtual Machines NCads A100 v4 Series Windows"),
    item(9.2, productName="NCads A100 v4 Series Cloud Services"),
    item(9.3, type="DevTestConsumption"),
    item(9.4, type="Reservation", reservationTerm="1 Year"),
    item(9.5, armRegionName="westeurope"),
    item(9.6, unitOfMeasure="1 GB/Month"),
    item(9.7, currencyCode="EUR"),
    item(9.8, tierMinimumUnits=100.0),
    item(9.9, serviceName="Azure Machine Learning"),
    item(1.0, armSkuName="Standard_two_prices"),
    item(1.1, armSkuName="Standard_two_prices"),
]


def test_linux_machines_on_demand_and_as_spot_are_kept():
    assert prices.parse([{"Items": ITEMS[:3]}, {"Items": ITEMS[3:]}], "eastus") == ({GPU: 3.5}, {GPU: 0.7})


@pytest.mark.parametrize("page", [[], {}, {"Items": [{}]}, {"Items": 3}, {"Items": [item(1) | {"skuName": None}]}])
def test_an_answer_of_another_shape_is_no_list(page: Any):
    with pytest.raises(BadList, match="unexpected entry"):
        prices.parse([page], "eastus")


def test_pages_are_followed_at_azures_own_address_and_kept(home: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def page(url: str, headers: Mapping[str, str]) -> Any:
        asked.append(url)
        more = {"NextPageLink": "https://elsewhere:443/api/retail/prices?$filter=a eq 'b'&$skip=1000"}
        return {"Items": ITEMS[:2], **(more if len(asked) == 1 else {"NextPageLink": None})}

    monkeypatch.setattr(download, "page", page)
    found = refresh.refresh(home, "azureml/eastus")
    assert len(asked) == 2 and "armRegionName%20eq%20%27eastus%27" in asked[0]
    assert asked[1] == f"{prices.AZURE}/api/retail/prices?$filter=a%20eq%20%27b%27&$skip=1000"
    assert (found.usd_per_hour, found.spot) == ({GPU: 3.5}, {GPU: 0.7})
    price = lists.listed(f"azureml/eastus/{GPU}", None, 2, home)
    assert price and (price["usd_per_hour"], price["spot"]) == (7.0, [1.4, 1.4])
    stored = lists.file_of(home, "azureml/eastus")
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "spot": {GPU: -1}}))
    lists._read.cache_clear()
    assert "spot" not in (lists.listed(f"azureml/eastus/{GPU}", None, 2, home) or {})


def test_a_list_without_end_is_refused():
    class Endless:
        def page(self, url: str, headers: Mapping[str, str]) -> Any:
            return {"Items": [], "NextPageLink": "https://prices.azure.com/api/retail/prices?$skip=1"}

    with pytest.raises(BadList, match="pages"):
        prices.read_prices(Endless(), "eastus")  # type: ignore[arg-type]
