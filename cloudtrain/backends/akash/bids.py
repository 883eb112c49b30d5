"""Choose a bid: by price, GPU, uptime and notice; and say in one table why the others were not taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.backends.akash.sdl import DENOM, usd_per_hour
from cloudtrain.job import units


@dataclass(frozen=True)
class Offer:
    """A bid on all nodes of an attempt, with what the Console knows of its provider."""

    bid: Mapping[str, Any]
    provider: str  # its address
    name: str
    usd_per_hour: float  # of all nodes together
    gpu: str
    uptime: float | None  # of the last 7 days, 0 to 1
    reclamation_window: str
    why_not: str  # "" where it may be taken

    def to_dict(self) -> dict[str, Any]:
        """Return the row that is kept with the lease."""
        fields = ("provider", "name", "usd_per_hour", "gpu", "uptime", "reclamation_window", "why_not")
        return {name: getattr(self, name) for name in fields}


def rate(
    bids: Iterable[Mapping[str, Any]],
    providers: Mapping[str, Mapping[str, Any]],
    *,
    ceiling_usd: float,
    gpus: Sequence[Mapping[str, str]],
    options: Mapping[str, Any],
) -> list[Offer]:
    """Return the offers, those that may be taken first, the cheapest and then the most reliable one first.

    Args:
        ceiling_usd: highest price of all nodes in USD an hour.
        gpus: model and memory of each GPU that the nodes must have.
    """
    offers = [_offer(bid, providers.get(str(bid["id"]["provider"]), {}), ceiling_usd, gpus, options) for bid in bids]
    return sorted(
        offers, key=lambda offer: (bool(offer.why_not), offer.usd_per_hour, -(offer.uptime or 0), offer.provider)
    )


def _offer(
    bid: Mapping[str, Any],
    about: Mapping[str, Any],
    ceiling_usd: float,
    gpus: Sequence[Mapping[str, str]],
    options: Mapping[str, Any],
) -> Offer:
    provider, price = str(bid["id"]["provider"]), bid["price"]
    usd = round(usd_per_hour(float(price["amount"])), 6)
    uptime = about.get("uptime7d")
    offered = _gpus(bid)
    notice = str(bid.get("reclamation_window") or "")
    why = ""
    if bid["state"] != "open":
        why = f"the bid is {bid['state']}"
    elif price["denom"] != DENOM:
        why = f"priced in {price['denom']}"
    elif usd > ceiling_usd * (1 + 1e-9):
        why = f"over the ceiling of {ceiling_usd:.2f} USD/h"
    elif provider in (options.get("avoid") or ()):
        why = "named in options.akash.avoid"
    elif missing := [gpu["model"] for gpu in gpus if not any(_has(gpu, key) for key in offered)]:
        why = f"offers no {missing[0]}"
    elif about.get("isOnline") is False:
        why = "the provider is offline"
    elif uptime is not None and uptime < float(options.get("min_uptime", 0.9)):
        why = f"uptime {uptime:.0%} in 7 days"
    elif (window := options.get("reclamation_window")) and _seconds(notice) < _seconds(str(window)):
        why = f"gives {notice or 'no'} notice"
    name = str(about.get("name") or about.get("hostUri") or provider).removeprefix("https://").partition(":")[0]
    return Offer(bid, provider, name[:60], usd, ", ".join(offered), uptime, notice, why)


def table(offers: Iterable[Offer | Mapping[str, Any]]) -> str:
    """Return the offers in one line each, for people."""
    rows = [offer.to_dict() if isinstance(offer, Offer) else offer for offer in offers]
    lines = []
    for row in rows:
        uptime = "" if row["uptime"] is None else f", uptime {row['uptime']:.0%}"
        gpu = f", {row['gpu']}" if row["gpu"] else ""
        lines.append(f"{row['name']}: {row['usd_per_hour']:.4g} USD/h{gpu}{uptime} ({row['why_not'] or 'possible'})")
    return "; ".join(lines)


def _gpus(bid: Mapping[str, Any]) -> list[str]:
    """Return the GPU models of a bid: a100/ram/80Gi."""
    keys = {
        str(attribute["key"]).removeprefix("vendor/nvidia/model/")
        for offer in bid.get("resources_offer") or ()
        for attribute in (offer["resources"].get("gpu") or {}).get("attributes") or ()
    }
    return sorted(keys)


def _has(gpu: Mapping[str, str], key: str) -> bool:
    model, _, rest = key.partition("/")
    return model == gpu["model"] and ("ram" not in gpu or "ram/" not in rest or f"ram/{gpu['ram']}" in rest)


def _seconds(text: str) -> float:
    try:
        return float(text.removesuffix("s")) if text.endswith("s") and text[:-1].isdigit() else units.duration_s(text)
    except ValueError:
        return 0.0
