"""The seed of all tests that draw: a change meets the draws on which main is green."""

from __future__ import annotations

import os

FIXED = 20260101


def first_seed() -> int:
    """Return CLOUDTRAIN_SEED, which `make test-long` draws anew, else a constant; print it for whoever repeats the test."""
    seed = int(os.environ.get("CLOUDTRAIN_SEED") or FIXED)
    print(f"CLOUDTRAIN_SEED={seed}")
    return seed
