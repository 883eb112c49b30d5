"""Read price lists over the network and store them; a list that cannot be read leaves the stored one as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloudtrain.clock import SYSTEM
from cloudtrain.forecast import download, price_lists
from cloudtrain.forecast.price_lists import BadList, Offer
from cloudtrain.forecast.prices import PriceList, file_of, load
from cloudtrain.source.atomic import new_file

# https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-bulk-api.html (2026-11-23)
AWS = "https://pricing.us-east-1.amazonaws.com"
# https://cloud.google.com/billing/v1/how-tos/catalog-api; the service is Vertex AI (2026-11-23)
GOOGLE = "https://cloudbilling.googleapis.com"
VERTEX_SERVICE = "C7E2-9256-1C43"
PAGE_SIZE, MOST_PAGES = 1000, 100
# github.com/skypilot-org/skypilot-catalog, written every seven hours (2026-11-23). It has no licence: read, never shipped.
SKYPILOT = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"


def refresh(home: Path, name: str, google_key: str = "") -> PriceList:
    """Read a list (provider/region) and store it; blocking, for up to ten minutes.

    Raises:
        BackendError: the answer is not such a list, or too large; the stored list stays.
        Unreachable: no answer, or too slow; the stored list stays.
    """
    found = download.within(download.LONGEST_S, lambda: _read(name, google_key), name)
    old = load(home, name)
    if not found.usd_per_hour or (old and 2 * len(found.usd_per_hour) < len(old.usd_per_hour)):
        before = f", the stored one {len(old.usd_per_hour)}" if old else ""
        raise BadList(f"the list of {name} has prices of {len(found.usd_per_hour)} machine types{before}")
    with new_file(file_of(home, name)) as file:
        file.write(json.dumps(asdict(found), indent=1, sort_keys=True).encode())
    return found


def _read(name: str, google_key: str) -> PriceList:
    provider, _, region = name.partition("/")
    estimate = ""
    if provider == "sagemaker":
        url = f"{AWS}/offers/v1.0/aws/AmazonSageMaker/current/{region}/index.csv"
        offer = price_lists.read_sagemaker(download.lines(url), region)
        source = f"AWS's price list {offer.version}".rstrip()
    elif provider == "vertex" and google_key:
        url = f"{GOOGLE}/v1/services/{VERTEX_SERVICE}/skus?currencyCode=USD&pageSize={PAGE_SIZE}"
        offer = price_lists.read_vertex(_pages(url, google_key), region)
        source = "Google's Billing Catalog"
    else:
        catalogue = "gcp" if provider == "vertex" else provider
        url = f"{SKYPILOT}/{catalogue}/vms.csv"
        offer = price_lists.read_catalogue(download.lines(url), region, catalogue)
        source = "SkyPilot's catalogue"
        if provider == "vertex":
            offer = price_lists.estimate_vertex(offer.usd_per_hour)
            estimate = f"{price_lists.VERTEX_FACTOR} times Compute Engine's price"
    return _listed(name, offer, source, estimate, url)


def _listed(name: str, offer: Offer, source: str, estimate: str, url: str) -> PriceList:
    return PriceList(name, offer.usd_per_hour, source, SYSTEM.utc().date().isoformat(), estimate, url)


def _pages(url: str, key: str) -> Iterator[Any]:
    """Yield the pages of Google's catalogue; the key goes in a header, so that no address has it."""
    token = ""
    for _ in range(MOST_PAGES):
        page = download.page(url + (f"&pageToken={quote(token, safe='')}" if token else ""), {"X-Goog-Api-Key": key})
        yield page
        token = str(page.get("nextPageToken") or "") if isinstance(page, dict) else ""
        if not token:
            return
    raise BadList(f"Google's catalogue has more than {MOST_PAGES} pages")
