"""Draw the next trial of a sweep from its history: grid, random, and Optuna's samplers asked statelessly.

Optuna gets the whole history at each ask and keeps nothing: the same seed and history give the same trial. Every number
is drawn as its share of the distribution, from 0 to 1, so that all distributions of `space` are searched alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cloudtrain.errors import BadRequest, MissingExtra, install_command
from cloudtrain.sweeps.file import SweepFile
from cloudtrain.sweeps.space import Parameter, grid

NOTES = "optuna"  # the generation of NSGA-II and CMA-ES, and the latter's state
GENERATION = 20  # trials of NSGA-II; Optuna's 50 are more than most sweeps have


@dataclass(frozen=True)
class Past:
    """A trial that was drawn before.

    Attributes:
        point: share of each parameter's distribution, or the position in its list; below NOTES what a sampler has noted.
        result: a value for each metric; None while it runs.
        reports: what it has reported of the first metric.
    """

    point: Mapping[str, Any]
    result: Sequence[float] | None
    reports: Sequence[float] = ()


def draw(sweep: SweepFile, number: int, past: Sequence[Past]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the parameters of the trial of this number (from 1) and its point; None where a grid has no more.

    Raises MissingExtra without Optuna, BadRequest where its sampler needs another package.
    """
    if sweep.method == "grid":
        params = next(islice(grid(sweep.parameters), number - 1, number), None)
        return None if params is None else (params, {})
    searched = sweep.searched
    if sweep.method == "random" or not searched:
        choose = random.Random(f"{sweep.seed}/{number}")
        point: dict[str, Any] = {parameter.name: choose.random() for parameter in searched}
        return {parameter.name: parameter.at(point.get(parameter.name, 0.0)) for parameter in sweep.parameters}, point
    return _ask(sweep, searched, number, past)


def _ask(
    sweep: SweepFile, searched: Sequence[Parameter], number: int, past: Sequence[Past]
) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        import optuna
    except ImportError:
        raise MissingExtra(f"method {sweep.method}", "sweep") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions: list[Any] = [metric.goal for metric in sweep.metrics]
    space = {parameter.name: _distribution(optuna, parameter) for parameter in searched}
    study = optuna.create_study(directions=directions, sampler=_sampler(optuna, sweep, number))
    for trial in past:
        if trial.point.keys() - {NOTES} == space.keys():
            study.add_trial(_frozen(optuna, trial, space))
    try:
        asked = study.ask(space).params
    except ModuleNotFoundError as error:
        raise BadRequest(
            f"method {sweep.method} needs the package {error.name}", install_command(str(error.name))
        ) from None
    point: dict[str, Any] = {name: float(value) for name, value in asked.items()}
    params = {}
    for parameter in sweep.parameters:
        at = point.get(parameter.name, 0.0)
        params[parameter.name] = parameter.values[int(at)] if _is_choice(parameter) else parameter.at(at)
    if notes := study.get_trials(deepcopy=False)[-1].system_attrs:
        point[NOTES] = {name: value for name, value in notes.items() if isinstance(value, str | int | float)}
    return params, point


def _is_choice(parameter: Parameter) -> bool:
    return parameter.is_list and parameter.distribution == "categorical"


def _distribution(optuna: Any, parameter: Parameter) -> Any:
    if _is_choice(parameter):
        return optuna.distributions.CategoricalDistribution(range(len(parameter.values)))
    return optuna.distributions.FloatDistribution(0.0, 1.0)


def _sampler(optuna: Any, sweep: SweepFile, number: int) -> Any:
    seed = random.Random(f"{sweep.seed}/{number}").randrange(1 << 32)
    if sweep.method == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=GENERATION)
    if sweep.method == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _frozen(optuna: Any, trial: Past, space: Mapping[str, Any]) -> Any:
    """Return a past trial as Optuna has it. One that runs counts too: two trials at once are not drawn at one place."""
    states = optuna.trial.TrialState
    params = {name: trial.point[name] if _is_number(optuna, space[name]) else int(trial.point[name]) for name in space}
    return optuna.trial.create_trial(
        state=states.RUNNING if trial.result is None else states.COMPLETE,
        values=trial.result,
        params=params,
        distributions=dict(space),
        system_attrs=trial.point.get(NOTES),
        intermediate_values={step: value for step, value in enumerate(trial.reports) if math.isfinite(value)},
    )


def _is_number(optuna: Any, distribution: Any) -> bool:
    return isinstance(distribution, optuna.distributions.FloatDistribution)
