"""The space of a sweep: its parameters, and the value of each at a number from 0 to 1.

The distributions are those of W&B's sweep files (https://docs.wandb.ai/models/sweeps/sweep-config-keys and
src/sweeps/config/schema.json of github.com/wandb/sweeps, b1dfc5f, 2026-08-05). A trial is a mapping from each parameter's
name to its value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist
from typing import Any

from cloudtrain.errors import MissingExtra, Problem

# distribution -> the keys that it needs, and those that it may have with their defaults
_LIMITS = ("min", "max")
_NORMAL = {"mu": 0.0, "sigma": 1.0}
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "constant": (("value",), {}),
    "categorical": (("values",), {}),
    "categorical_w_probabilities": (("values", "probabilities"), {}),
    "int_uniform": (_LIMITS, {}),
    "uniform": (_LIMITS, {}),
    "q_uniform": (_LIMITS, {"q": 1}),
    "log_uniform": (_LIMITS, {}),
    "log_uniform_values": (_LIMITS, {}),
    "q_log_uniform": (_LIMITS, {"q": 1}),
    "q_log_uniform_values": (_LIMITS, {"q": 1}),
    "inv_log_uniform": (_LIMITS, {}),
    "inv_log_uniform_values": (_LIMITS, {}),
    "normal": ((), _NORMAL),
    "q_normal": ((), {**_NORMAL, "q": 1}),
    "log_normal": ((), _NORMAL),
    "q_log_normal": ((), {**_NORMAL, "q": 1}),
    "beta": ((), {"a": 1.0, "b": 1.0}),
    "q_beta": ((), {"a": 1.0, "b": 1.0, "q": 1}),
}
_EXPONENTS = ("log_uniform", "q_log_uniform", "inv_log_uniform")  # their min and max are exponents of e
_LISTED = ("constant", "categorical", "int_uniform", "q_uniform")  # what a grid takes
# Keys of other tools by which a parameter depends on another one's value.
_CONDITIONS = (
    "condition",
    "conditions",
    "when",
    "if",
    "depends_on",
    "parent",
    "parent_value",
    "children",
    "activate_on",
)
CONDITIONAL = "write one sweep for each branch, or search the parameter always and let the script ignore it elsewhere"
MOST_STEPS = 10_000  # of one parameter of a grid


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name in the job, its distribution, and the distribution's keys."""

    name: str
    distribution: str
    keys: Mapping[str, Any]

    @property
    def values(self) -> Sequence[Any]:
        """The values of a list; [] for a distribution over numbers."""
        if self.distribution == "constant":
            return [self.keys["value"]]
        values: Sequence[Any] = self.keys.get("values") or []
        return values

    @property
    def is_list(self) -> bool:
        return bool(self.values)

    def at(self, point: float) -> Any:
        """Return the value below which this share of the distribution lies; `point` is from 0 to 1."""
        kind, keys = self.distribution, self.keys
        if kind == "categorical_w_probabilities":
            return self.values[_index(point, [p / sum(keys["probabilities"]) for p in keys["probabilities"]])]
        if self.is_list:
            return self.values[min(int(point * len(self.values)), len(self.values) - 1)]
        if kind == "int_uniform":
            low, high = int(keys["min"]), int(keys["max"])
            return min(low + int(point * (high - low + 1)), high)
        value = self._number(point)
        if "q" not in keys:
            return value
        rounded = round(value / keys["q"]) * keys["q"]
        return int(rounded) if isinstance(keys["q"], int) else rounded

    def _number(self, point: float) -> float:
        kind, keys = self.distribution.removeprefix("q_"), self.keys
        inner = min(max(point, 1e-12), 1 - 1e-12)  # the ends of these lie in infinity
        if kind in ("normal", "log_normal"):
            value = keys["mu"] if not keys["sigma"] else NormalDist(keys["mu"], keys["sigma"]).inv_cdf(inner)
            return math.exp(value) if kind == "log_normal" else float(value)
        if kind == "beta":
            return _beta(inner, keys["a"], keys["b"])
        low, high = keys["min"], keys["max"]
        if kind.endswith("_values"):
            low, high = math.log(low), math.log(high)
            if kind.startswith("inv_"):
                low, high = -high, -low
        if kind.startswith("inv_"):
            return math.exp(-(low + (1 - point) * (high - low)))
        value = low + point * (high - low)
        return math.exp(value) if kind.startswith("log_") else value

    def steps(self) -> list[Any]:
        """Return all values, for a grid; raises ValueError for a distribution that has no list of them."""
        if self.distribution not in _LISTED:
            raise ValueError(
                f"grid search needs a list of values for {self.distribution}: write values: [...], int_uniform or q_uniform"
            )
        if self.is_list:
            return list(self.values)
        q = self.keys.get("q", 1)
        first, last = round(self.keys["min"] / q), round(self.keys["max"] / q)
        if last - first >= MOST_STEPS:
            raise ValueError(f"a grid of more than {MOST_STEPS} steps: use a larger q, or method: random")
        return [self.at(0) if last == first else step * q for step in range(first, last + 1)]


def parse(document: Mapping[str, Any]) -> tuple[list[Parameter], list[Problem]]:
    """Return the parameters of a sweep file's section `parameters`, and what is wrong with it."""
    found: list[Parameter] = []
    problems: list[Problem] = []
    for name, path, given in _flat(document, "", "parameters"):
        try:
            found.append(_parameter(name, given))
        except ValueError as error:
            problems.append(Problem(str(error), path))
    if not found and not problems:
        problems.append(Problem("must list at least one parameter", "parameters"))
    return found, problems


def grid(parameters: Sequence[Parameter]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the parameters' values, the last parameter fastest; raises ValueError."""
    columns = [parameter.steps() for parameter in parameters]
    for row in product(*columns):
        yield {parameter.name: value for parameter, value in zip(parameters, row, strict=True)}


def _flat(document: Any, prefix: str, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, path and keys of each parameter; nested ones are named with dots."""
    if not isinstance(document, Mapping):
        yield prefix, path, document
        return
    for key, given in document.items():
        name, where = f"{prefix}{key}", f"{path}.{key}"
        if isinstance(given, Mapping) and given.keys() == {"parameters"} and isinstance(given["parameters"], Mapping):
            yield from _flat(given["parameters"], f"{name}.", f"{where}.parameters")
        else:
            yield name, where, given


def _parameter(name: str, given: Any) -> Parameter:
    if not isinstance(given, Mapping):
        raise ValueError(f"is {given!r}: write value: {given!r}, values: [...], or min and max")
    values = given.get("values")
    listed = values if isinstance(values, list) else []
    spaces = [each for each in listed if isinstance(each, Mapping) and any(map(_is_space, each.values()))]
    if named := [key for key in given if key in (*_CONDITIONS, "parameters")] or ["values"] * bool(spaces):
        raise ValueError(f"{named[0]}: a parameter that depends on another one's value is not supported: {CONDITIONAL}")
    kind = str(given.get("distribution") or _guess(given))
    if kind not in DISTRIBUTIONS:
        raise ValueError(f"there is no distribution {kind!r}; one of {', '.join(DISTRIBUTIONS)}")
    needed, defaults = DISTRIBUTIONS[kind]
    keys = {key: given[key] for key in given if key != "distribution"}
    if missing := [key for key in needed if key not in keys]:
        raise ValueError(f"{kind} needs {' and '.join(missing)}")
    if unknown := [key for key in keys if key not in (*needed, *defaults)]:
        raise ValueError(f"{kind} does not take {', '.join(unknown)}")
    keys = {**defaults, **keys}
    _check(kind, keys)
    parameter = Parameter(name, kind, keys)
    try:
        if not kind.endswith("beta"):  # whose values need SciPy
            parameter.at(0.0), parameter.at(1.0)
    except OverflowError:
        raise ValueError("has values that no float can hold: write smaller limits, or a larger q") from None
    return parameter


def _is_space(value: Any) -> bool:
    """Return whether a value inside of `values` is itself a parameter with a distribution."""
    return isinstance(value, Mapping) and bool(value.keys() & {"distribution", "values", "min", "max"})


def _guess(given: Mapping[str, Any]) -> str:
    """Return the distribution of a parameter that names none, as W&B does: two whole numbers are int_uniform."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical_w_probabilities" if "probabilities" in given else "categorical"
    if "min" in given and "max" in given:
        return "int_uniform" if all(type(given[key]) is int for key in _LIMITS) else "uniform"
    raise ValueError("write value, values, min and max, or a distribution")


def _check(kind: str, keys: Mapping[str, Any]) -> None:
    """Raise ValueError where the keys of a distribution contradict each other."""
    if "values" in keys and (not isinstance(keys["values"], list) or not keys["values"]):
        raise ValueError("values must be a list of at least one value")
    if "probabilities" in keys:
        shares = keys["probabilities"]
        numbers = isinstance(shares, list) and all(is_number(share) and share >= 0 for share in shares)
        if not numbers or len(shares) != len(keys["values"]) or not sum(shares):
            raise ValueError("probabilities needs one number for each of values, none negative")
    for key in ("min", "max", "q", "mu", "sigma", "a", "b"):
        if key in keys and not is_number(keys[key]):
            raise ValueError(f"{key} is {shown(keys[key])}, not a number")
    if keys.get("q", 1) <= 0 or keys.get("sigma", 1) < 0 or keys.get("a", 1) <= 0 or keys.get("b", 1) <= 0:
        raise ValueError("q, a and b must be above 0, and sigma must not be negative")
    if kind == "int_uniform" and not all(type(keys[key]) is int for key in _LIMITS):
        raise ValueError("min and max of int_uniform must be whole numbers")
    if "min" in keys and "max" in keys:
        if keys["min"] > keys["max"]:
            raise ValueError(f"min is {keys['min']}, above max, {keys['max']}")
        if kind.endswith("_values") and keys["min"] <= 0:
            raise ValueError(f"{kind} needs a min above 0")
        if kind in _EXPONENTS and (keys["max"] > 700 or keys["min"] < -700):
            raise ValueError(f"{kind} takes exponents of e, not values; for values use {kind}_values for values")


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold, and not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def shown(value: Any) -> str:
    """Return a value for a message; a number may have more digits than Python writes."""
    return "a number of over 40 digits" if isinstance(value, int) and abs(value) >= 10**40 else repr(value)


def _index(point: float, shares: Sequence[float]) -> int:
    total = 0.0
    for index, share in enumerate(shares):
        total += share
        if point < total:
            return index
    return max(index for index, share in enumerate(shares) if share)


def _beta(point: float, a: float, b: float) -> float:
    try:
        from scipy.stats import beta
    except ImportError:
        raise MissingExtra("a beta distribution", "sweep") from None
    return float(beta.ppf(point, a, b))
