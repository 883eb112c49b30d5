"""Claim an epoch in the output, so that only the newest start of a run uploads.

An epoch is an object that only one start can create: <output>/<run>/epochs/00000002.json. An earlier start may still be
alive behind a network that has healed: it reads here that it was replaced, and uploads and removes nothing any more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from ..status import now
from .store import Store

FOLDER = "epochs"


def claim(store: Store, attempt: int, at_least: int) -> int:
    """Claim the next epoch and return it; blocking. Raises Failed.

    `at_least` is the newest that this node's folders know of.
    """
    number = max(attempt - 1, newest(store), at_least) + 1
    token = os.urandom(16).hex()  # a request whose answer was lost is known again by it
    while True:
        data = json.dumps({"epoch": number, "attempt": attempt, "token": token, "at": now()}).encode()
        if store.create(f"{FOLDER}/{number:08d}.json", data):
            return number
        number += 1


def newest(store: Store) -> int:
    """Return the newest epoch that has been claimed, 0 for none; blocking. Raises Failed."""
    return latest(store.list(FOLDER))


def latest(names: Iterable[str]) -> int:
    """Return the largest number among names of claims."""
    stems = (name.partition(".")[0] for name in names if name.endswith(".json"))
    return max((int(stem) for stem in stems if stem.isdigit()), default=0)


def here(checkpoints: str) -> int:
    """Return the newest epoch that a folder of checkpoints knows of."""
    try:
        return latest(os.listdir(os.path.join(checkpoints, FOLDER)))
    except OSError:
        return 0
