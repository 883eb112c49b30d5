"""Read price lists over the network and store them; a list that cannot be read leaves the stored one as it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from cloudtrain.backends import registry
from cloudtrain.backends.price_lists import BadList, read_catalogue
from cloudtrain.clock import SYSTEM
from cloudtrain.forecast import download
from cloudtrain.forecast.prices import PriceList, file_of, load
from cloudtrain.job.homes import new_file


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
    kind = registry.priced_by(provider)
    if kind:
        offer = kind.read_prices(provider, region, google_key, download)
    else:
        offer = read_catalogue(download, provider, region).offer()
    today = SYSTEM.utc().date().isoformat()
    return PriceList(name, offer.usd_per_hour, offer.source, today, offer.estimate, offer.url, offer.spot)
