"""Which bids are taken: what providers send, each with one thing wrong, and the reason in the table."""

from __future__ import annotations

from typing import Any

import pytest

from cloudtrain.backends.akash import bids

A100 = "vendor/nvidia/model/a100/ram/80Gi/interface/sxm"


def offer(
    *, gpu: str = A100, state: str = "open", denom: str = "uact", about: dict[str, Any] | None = None, window: str = ""
) -> bids.Offer:
    """Return the offer of a bid at 1.2 USD an hour, where 1.5 is the ceiling and an A100 with 80 GiB is asked for."""
    attributes = [{"key": gpu, "value": "true"}] if gpu else []
    bid = {
        "id": {"provider": "akash1p"},
        "state": state,
        "price": {"denom": denom, "amount": "2000"},
        "resources_offer": [{"resources": {"gpu": {"attributes": attributes}}}],
        **({"reclamation_window": window} if window else {}),
    }
    options = {"reclamation_window": "1h"} if window else {}
    providers = {"akash1p": {"owner": "akash1p", "uptime7d": 0.99, **(about or {})}}
    wanted = {"model": "a100", "ram": "80Gi"}
    (made,) = bids.rate([bid], providers, ceiling_usd=1.5, gpus=[wanted] if wanted else [], options=options)
    return made


def test_a_bid_that_is_taken() -> None:
    made = offer()
    assert (made.why_not, made.usd_per_hour, made.gpu) == ("", 1.2, "a100/ram/80Gi/interface/sxm")
    assert bids.table([made]) == "akash1p: 1.2 USD/h, a100/ram/80Gi/interface/sxm, uptime 99% (possible)"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu": "vendor/nvidia/model/h100/ram/80Gi"}, "offers no a100"),
        ({"gpu": "vendor/nvidia/model/a100/ram/40Gi"}, "offers no a100"),
        ({"gpu": ""}, "offers no a100"),
        ({"state": "lost"}, "the bid is lost"),
        ({"denom": "uakt"}, "priced in uakt"),
        ({"about": {"isOnline": False}}, "the provider is offline"),
        ({"about": {"uptime7d": 0.5}}, "uptime 50% in 7 days"),
        ({"window": "3599s"}, "gives 3599s notice"),
    ],
)
def test_a_bid_that_is_not_taken(changes: dict[str, Any], why: str) -> None:
    assert offer(**changes).why_not == why


@pytest.mark.parametrize(
    "changes", [{"gpu": "vendor/nvidia/model/a100"}, {"window": "3600s"}, {"about": {"uptime7d": None}}]
)
def test_what_is_not_known_or_just_enough_is_no_reason(changes: dict[str, Any]) -> None:
    assert offer(**changes).why_not == ""
