"""The next trial of a sweep: the same history gives the same trial, and what is learned finds better ones."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

import optuna
import pytest

from cloudtrain.errors import MissingExtra
from cloudtrain.sweeps.draw import Past, draw
from cloudtrain.sweeps.file import SweepFile, read

optuna.logging.set_verbosity(optuna.logging.ERROR)
TRIALS, SEEDS = 30, 8
SPACE = {
    "x": {"min": -5.0, "max": 5.0},
    "lr": {"distribution": "log_uniform_values", "min": 1e-6, "max": 1.0},
    "kind": {"values": ["plain", "wide"]},
}
FUNCTIONS = {
    "bowl": lambda p: p["x"] ** 2 + (math.log10(p["lr"]) + 3) ** 2 + (p["kind"] == "wide"),
    "ridge": lambda p: (p["x"] - math.log10(p["lr"]) - 3) ** 2 + 0.1 * p["x"] ** 2 + (p["kind"] == "plain"),
    "waves": lambda p: (
        10 + p["x"] ** 2 - 10 * math.cos(p["x"]) + (math.log10(p["lr"]) + 4) ** 2 + (p["kind"] == "wide")
    ),
}


def sweep(method: str, seed: int = 0, **keys) -> SweepFile:
    metric = {} if "metrics" in keys else {"metric": {"name": "loss"}}
    document = {"job": {"entrypoint": "train.py"}, "method": method, "parameters": SPACE, "run_cap": 99, "seed": seed}
    return read({**document, **metric, **keys}, Path())


def best(method: str, function, seed: int, trials: int = TRIALS) -> float:
    found, past = sweep(method, seed), []
    for number in range(1, trials + 1):
        params, point = draw(found, number, past)
        past.append(Past(point, [function(params)]))
    return min(trial.result[0] for trial in past)


def by_optuna(function, seed: int) -> float:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def objective(trial: optuna.Trial) -> float:
        return function(
            {
                "x": trial.suggest_float("x", -5, 5),
                "lr": trial.suggest_float("lr", 1e-6, 1, log=True),
                "kind": trial.suggest_categorical("kind", ["plain", "wide"]),
            }
        )

    study.optimize(objective, n_trials=TRIALS)
    return study.best_value


def test_tpe_finds_what_optuna_alone_finds():
    """Asked statelessly it is as good within the noise of seeds, and better than chance.

    Of 1,600 comparisons of 40 seeds with 40 others, Optuna's own loop wins 43 to 58 in 100 against itself.
    """
    against_optuna, against_chance = [], []
    for function in FUNCTIONS.values():
        ours = [best("tpe", function, seed) for seed in range(SEEDS)]
        theirs = [by_optuna(function, seed) for seed in range(SEEDS)]
        chance = [best("random", function, seed) for seed in range(SEEDS)]
        against_optuna += [mine < other for mine in ours for other in theirs]
        against_chance += [mine < other for mine in ours for other in chance]
    assert sum(against_optuna) / len(against_optuna) > 0.3
    assert sum(against_chance) / len(against_chance) > 0.6


@pytest.mark.parametrize("method", ["random", "tpe", "nsga2", "cmaes"])
def test_the_same_history_gives_the_same_trial(method: str):
    found = sweep(method)
    past = [Past(draw(found, number, [])[1], [float(number)]) for number in range(1, 12)]
    running = [*past, Past(past[0].point, None)]
    assert draw(found, 13, running) == draw(found, 13, running)
    assert draw(found, 13, running) != draw(found, 14, running)


def test_cma_es_learns_through_the_notes_that_it_keeps_with_the_trials():
    bowl = FUNCTIONS["bowl"]
    assert median(best("cmaes", bowl, seed, 60) for seed in range(3)) < 0.5 * median(
        best("random", bowl, seed, 60) for seed in range(3)
    )


def test_two_objectives_are_searched_together():
    found, past = sweep("nsga2", metrics=[{"name": "a"}, {"name": "b", "goal": "maximize"}]), []
    for number in range(1, 101):
        params, point = draw(found, number, past)
        past.append(Past(point, [(params["x"] - 1) ** 2, -((params["x"] + 1) ** 2)]))
    late = [trial.point["x"] * 10 - 5 for trial in past[60:]]
    assert sum(-1.5 < x < 1.5 for x in late) > 24, "between both optima, where neither can be had without the other"


def test_a_grid_ends():
    found = sweep("grid", parameters={"a": {"values": [1, 2]}, "b": {"values": ["x", "y", "z"]}}, run_cap=None)
    drawn = [draw(found, number, []) for number in range(1, 8)]
    assert [params for params, _ in drawn[:2]] == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}] and drawn[6] is None
    assert drawn[5] == ({"a": 2, "b": "z"}, {})


def test_without_optuna_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingExtra, match="sweep"):
        draw(sweep("tpe"), 1, [])
    assert draw(sweep("random"), 1, [])
