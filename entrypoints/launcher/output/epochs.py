"""Claim an epoch in the output, so that only the newest start of a run uploads.

An epoch is an object that only one start can create: <output>/<run>/epochs/00000002.json. An earlier start may still be
alive behind a network that has healed: it reads here that it was replaced, and uploads and removes nothing any more.
"""

from __future__ import annotations

import json
import os

from .. import fence
from ..clock import SYSTEM, Clock
from ..status import now
from ..world.cluster import SAGEMAKER_OURS
from .store import Store, scheme

HISTORY = f"{SAGEMAKER_OURS}/history"


def claim(store: Store, attempt: int, at_least: int, clock: Clock = SYSTEM) -> int:
    """Claim the next epoch and return it; blocking. Raises Failed.

    `at_least` is the newest that this node's folders know of.
    """
    number = max(attempt - 1, newest(store), at_least) + 1
    while not claim_number(store, attempt, number, clock):
        number += 1
    return number


def claim_number(store: Store, attempt: int, number: int, clock: Clock = SYSTEM) -> bool:
    """Claim this epoch; False where another start has it. Blocking. Raises Failed."""
    token = os.urandom(16).hex()  # a request whose answer was lost is known again by it
    data = json.dumps({"epoch": number, "attempt": attempt, "token": token, "at": now(clock)}).encode()
    return store.create(fence.path_of(fence.FOLDER, number), data)


def newest(store: Store) -> int:
    """Return the newest epoch that has been claimed, 0 for none; blocking. Raises Failed."""
    return max(fence.numbers(store.list(fence.FOLDER)), default=0)


def newest_on_sagemaker(store: Store) -> int:
    """Return the newest attempt that has begun on SageMaker, 0 for none; blocking. Raises Failed.

    A launcher there claims no epoch: it has no client of the store. SageMaker copies the history that it writes.
    """
    if scheme(store.uri) != "s3":
        return 0
    attempts = (name.partition("/")[0].rpartition("-a")[2] for name in store.list(HISTORY))
    return max((int(number) for number in attempts if number.isdecimal()), default=0)
