"""SageMaker's prices, from AWS's price list of a region.

It is read as CSV rather than JSON: a row has product and price together, so that one row is in memory at a time.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable

from cloudtrain.backends.price_lists import BadList, CertainPrices, Downloads, Offer, checked

# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-bulk-api.html (2026-11-23)
AWS = "https://pricing.us-east-1.amazonaws.com"
_COLUMNS = ("Component", "TermType", "Unit", "Currency", "Region Code")


def read_prices(downloads: Downloads, region: str) -> Offer:
    """Read the on-demand prices of training in a region; blocking."""
    url = f"{AWS}/offers/v1.0/aws/AmazonSageMaker/current/{region}/index.csv"
    prices, version = parse(downloads.lines(url), region)
    return Offer(prices, f"AWS's price list {version}".rstrip(), url)


def parse(lines: Iterable[str], region: str) -> tuple[dict[str, float], str]:
    """Return the prices and the version of SageMaker's regional offer file (CSV).

    Five rows of metadata come before the header (docs.aws.amazon.com, "Reading the service price list file", 2026-11-23).
    """
    version, prices = "", CertainPrices()
    rows = csv.reader(lines)
    header: list[str] = []
    for number, row in enumerate(checked(rows)):
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
    return prices.certain(), version
