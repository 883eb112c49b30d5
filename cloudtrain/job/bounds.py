"""The largest numbers that a job may hold, each with its reason; what is larger is a slip of the keyboard.

Time and memory of a plan grow with some of these numbers. A bound stands well above what anybody runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Annotated, Any, TypeVar

from pydantic import Field, WrapValidator

from cloudtrain.job.problems import quote, wrong
from cloudtrain.job.units import MOST_RANKS, RANKS_WHY

MOST_NODES = 10_000
MOST_PROCESSES = 1024
FEW, MANY = 100, 10_000  # entries of lists and mappings
_PROCESSES_WHY = "no machine has more accelerators or cores for one training"


def at_most(most: float, why: str) -> WrapValidator:
    """Return what refuses a number above a bound, infinity and NaN, with the bound's reason."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool) and not value <= most:
            raise wrong(f"must be at most {most:,}, not {quote(value)}", why)
        return inner(value)

    return WrapValidator(check)


def no_more_than(most: int, why: str) -> WrapValidator:
    """Return what refuses a list or a mapping of more items than a bound, before any of them is looked at."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        if isinstance(value, Sized) and not isinstance(value, str) and len(value) > most:
            raise wrong(f"has {len(value):,} entries, {most:,} are possible", why)
        return inner(value)

    return WrapValidator(check)


T = TypeVar("T")
FEW_ENTRIES = no_more_than(FEW, "each one is prepared by a step of its own")
MANY_ENTRIES = no_more_than(MANY, "the command line of a process has no place for more")
Count = Annotated[int, Field(strict=True, ge=1)]
Nodes = Annotated[Count, Field(le=MOST_NODES), at_most(MOST_NODES, "no known training has more nodes")]
Processes = Annotated[Count, Field(le=MOST_PROCESSES), at_most(MOST_PROCESSES, _PROCESSES_WHY)]
Ranks = Annotated[Count, Field(le=MOST_RANKS), at_most(MOST_RANKS, RANKS_WHY)]
Cores = Annotated[Count, Field(le=100_000), at_most(100_000, "no machine has more CPU cores")]
DiskGb = Annotated[Count, Field(le=1_000_000), at_most(1_000_000, "no platform has larger disks: it is in GB")]
HourlyUsd = Annotated[float, Field(ge=0, le=100_000), at_most(100_000, "no machine costs more an hour, in USD")]
Attempts = Annotated[Count, Field(le=9999), at_most(9999, "an attempt's number has four digits")]
Checkpoints = Annotated[Count, Field(le=1_000_000), at_most(1_000_000, "no folder holds more checkpoints")]
Steps = Annotated[Count, Field(le=10**12), at_most(10**12, "a thousand steps a second take 30 years")]
Samples = Annotated[Count, Field(le=10**9), at_most(10**9, "no accelerator holds more in one pass")]
Passes = Annotated[Count, Field(le=100_000), at_most(100_000, "no optimizer step has more passes")]
Few = Annotated[T, Field(max_length=FEW), FEW_ENTRIES]
Many = Annotated[T, Field(max_length=MANY), MANY_ENTRIES]
