"""The market of the simulated network: providers, what they bid, and what a price in uact is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCKS_PER_HOUR = 600
OWNER = "akash1tenant00000000000000000000000000000000"


@dataclass
class Provider:
    """A provider: what it has, what it asks, and how it behaves."""

    address: str
    name: str
    usd_per_hour: float  # of a node
    gpus: tuple[str, ...] = ()  # vendor/nvidia/model/a100/ram/80Gi/interface/sxm
    uptime: float = 0.99
    audited: bool = True
    online: bool = True
    reclamation_s: int = 0  # the notice that it offers, 0 for none
    bid_after_s: float = 0.0
    silent: bool = False  # never bids
    over_ceiling: bool = False  # bids above the tenant's ceiling, which real providers do not
    gone: bool = False  # its gateway does not answer
    refuses_manifest: bool = False

    def bid(self, deployment: Mapping[str, Any], now: float) -> dict[str, Any] | None:
        """Return this provider's bid on a deployment, None where it makes none."""
        if self.silent or self.gone or now - deployment["created"] < self.bid_after_s:
            return None
        services = deployment["groups"][0]["services"]
        amount = sum(self.usd_per_hour * service["count"] for service in services) * 1e6 / BLOCKS_PER_HOUR
        if amount > deployment["ceiling"] and not self.over_ceiling:
            return None
        if 0 < self.reclamation_s < deployment["min_window_s"] or (
            deployment["min_window_s"] and not self.reclamation_s
        ):
            return None
        offers = []
        for service in services:
            asked = [item["key"] for item in service["resources"]["gpu"].get("attributes") or ()]
            matching = [gpu for gpu in self.gpus if any(gpu.startswith(key) for key in asked)]
            if asked and not matching:
                return None
            gpu = {
                "units": service["resources"]["gpu"]["units"],
                "attributes": [{"key": key, "value": "true"} for key in matching],
            }
            offers.append({"resources": {**service["resources"], "gpu": gpu}, "count": service["count"]})
        identity = {
            "owner": OWNER,
            "dseq": deployment["dseq"],
            "gseq": 1,
            "oseq": 1,
            "provider": self.address,
            "bseq": 0,
        }
        bid = {
            "id": identity,
            "state": "open" if not deployment["leases"] else "lost",
            "price": {"denom": "uact", "amount": f"{amount:.18f}"},
            "created_at": "1",
            "resources_offer": offers,
        }
        return bid | ({"reclamation_window": f"{self.reclamation_s}s"} if self.reclamation_s else {})

    def to_dict(self) -> dict[str, Any]:
        """Return what GET /v1/providers has of it, of the fields that somebody may read."""
        return {
            "owner": self.address,
            "name": self.name,
            "hostUri": f"https://{self.name}:8443",
            "uptime1d": self.uptime,
            "uptime7d": self.uptime,
            "uptime30d": self.uptime,
            "isValidVersion": True,
            "isOnline": self.online,
            "isAudited": self.audited,
            "gpuModels": [],
            "attributes": [],
        }
