"""When a running trial is stopped because others were better: Hyperband as W&B has it, ASHA, and the median rule.

An iteration is one report of the metric. Hyperband and ASHA compare at bands of iterations, the median rule at each one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cloudtrain.job.units import format_number
from cloudtrain.sweeps.space import shown

_KEYS = {
    "hyperband": {"min_iter", "max_iter", "s", "eta", "strict"},
    "asha": {"min_iter", "max_iter", "eta"},
    "median": {"min_iter", "startup_trials"},
}
_MOST_BANDS = 60
_MOST_ETA = 1000
MOST_REPORTS = 10**12  # of one trial


@dataclass(frozen=True)
class EarlyStop:
    """A rule for stopping trials, from the section `early_terminate`.

    Attributes:
        kind: hyperband, asha or median.
        bands: iterations at which trials are compared; for `median` the first one.
        eta: a trial continues where it is among the best 1/eta of a band.
        strict: whether its value at the band counts, instead of its best one so far.
        startup_trials: of the median rule: how many others must have come as far.
    """

    kind: str
    bands: tuple[int, ...]
    eta: float = 3.0
    strict: bool = False
    startup_trials: int = 4

    @classmethod
    def parse(cls, given: Any) -> EarlyStop:
        """Return the rule of a section; raises ValueError."""
        if not isinstance(given, Mapping) or given.get("type") not in _KEYS:
            raise ValueError(f"needs a type: {', '.join(_KEYS)}")
        kind = given["type"]
        if unknown := given.keys() - {"type"} - _KEYS[kind]:
            raise ValueError(f"{kind} does not take {', '.join(sorted(unknown))}")
        for key in ("min_iter", "max_iter", "s", "startup_trials"):
            limit = _MOST_BANDS if key == "s" else MOST_REPORTS
            if key in given and (type(given[key]) is not int or not 1 <= given[key] <= limit):
                raise ValueError(f"{key} is {shown(given[key])}, not a whole number from 1 to {limit:,}")
        eta = given.get("eta", 4 if kind == "asha" else 3)
        if not isinstance(eta, int | float) or not 1 < eta <= _MOST_ETA:
            raise ValueError(f"eta is {shown(eta)}, not a number above 1 and at most {_MOST_ETA:,}")
        if kind == "median":
            return cls(kind, (given.get("min_iter", 1),), startup_trials=given.get("startup_trials", 4))
        if kind == "hyperband" and "min_iter" not in given:
            if not {"max_iter", "s"} <= given.keys():
                raise ValueError("hyperband needs min_iter, or max_iter and s")
            bands = [int(given["max_iter"] / eta**step) for step in range(given["s"], 0, -1)]
        else:
            most = given.get("max_iter")
            bands = [int(given.get("min_iter", 1) * eta**step) for step in range(_MOST_BANDS)]
            bands = [band for band in bands if most is None or band < most] if kind == "asha" else bands
        bands = sorted({band for band in bands if band >= 1})
        if not bands:
            raise ValueError("hyperband has no brackets with these values: raise max_iter or s, or lower eta")
        return cls(kind, tuple(bands), float(eta), strict=kind == "asha" or bool(given.get("strict", True)))

    def stops(self, mine: Sequence[float], others: Sequence[Sequence[float]]) -> str:
        """Return why a trial is to be stopped, "" where it continues.

        Args:
            mine: the values that it has reported, in order; lower is better.
            others: those of all other trials, ended ones included.
        """
        if self.kind == "median":
            return self._below_median(mine, others)
        band = max((band for band in self.bands if band <= len(mine)), default=None)
        if band is None:
            return ""
        reached = sorted(values[band - 1] for values in (mine, *others) if len(values) >= band)
        limit = reached[int(len(reached) / self.eta)]
        value = mine[band - 1] if self.strict else min(mine)
        if value <= limit:
            return ""
        return f"{format_number(value)} is not among the best 1/{self.eta:g} of {len(reached)} trials at report {band}"

    def _below_median(self, mine: Sequence[float], others: Sequence[Sequence[float]]) -> str:
        at = len(mine)
        reached = [min(values[:at]) for values in others if len(values) >= at]
        if at < self.bands[0] or len(reached) < self.startup_trials:
            return ""
        limit = median(reached)
        return (
            f"{format_number(min(mine))} is behind the median {format_number(limit)} of {len(reached)} trials at report {at}"
            if min(mine) > limit
            else ""
        )
