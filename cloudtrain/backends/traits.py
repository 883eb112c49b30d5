"""Traits: what planning, history, policy, forecast, console and commands must know of a backend without asking it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What is always true of a backend; the defaults are those of a platform in a cloud of which nothing is known.

    Attributes:
        own_machines: its machines are this one, or others of your own: without accounts, regions, rented machines and
            images of a registry.
        prices: there are prices for its machines: `Backend.machine` names them as price lists do.
        shell: `Backend.shell` can start a program beside a rank, or names an address where a person can.
    """

    own_machines: bool = False
    prices: bool = False
    shell: bool = False
