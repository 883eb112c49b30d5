"""The parameters of a sweep: W&B's distributions give the values that W&B's own package gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.sweeps.space import DISTRIBUTIONS, grid, parse

WANDB = json.loads((Path(__file__).parent / "wandb.json").read_text())


def test_values_are_those_of_wandb():
    kinds = set()
    for keys, point, value in WANDB["values"]:
        (parameter,), problems = parse({"x": keys})
        assert not problems
        kinds.add(parameter.distribution)
        assert parameter.at(point) == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), keys
    assert kinds == DISTRIBUTIONS.keys()


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"value": 3}, "constant"),
        ({"values": [1, 2]}, "categorical"),
        ({"values": [1, 2], "probabilities": [1, 3]}, "categorical_w_probabilities"),
        ({"min": 1, "max": 4}, "int_uniform"),
        ({"min": 1, "max": 4.5}, "uniform"),
        ({"min": 1.0, "max": 4.0}, "uniform"),
    ],
)
def test_a_parameter_without_a_distribution_has_that_of_wandb(keys, kind):
    (parameter,), _ = parse({"x": keys})
    assert parameter.distribution == kind


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (0.1, "write value: 0.1"),
        ({}, "write value, values"),
        ({"values": []}, "at least one"),
        ({"distribution": "lognormal"}, "no distribution 'lognormal'"),
        ({"distribution": "uniform", "min": 1}, "uniform needs max"),
        ({"distribution": "normal", "mean": 0}, "does not take mean"),
        ({"min": 2, "max": 1}, "above max"),
        ({"distribution": "int_uniform", "min": 1, "max": 2.5}, "whole numbers"),
        ({"distribution": "log_uniform_values", "min": 0, "max": 1}, "min above 0"),
        ({"distribution": "log_uniform", "min": 1, "max": 1000}, "exponents of e"),
        ({"distribution": "q_uniform", "min": 1, "max": 4, "q": 0}, "above 0"),
        ({"values": ["a", "b"], "probabilities": [1]}, "one number for each"),
        ({"min": "low", "max": 2, "distribution": "uniform"}, "not a number"),
        ({"min": 0, "max": 1, "condition": "opt == 'sgd'"}, "condition: a parameter that depends on another"),
        ({"values": ["a"], "parameters": {"b": {"value": 1}}}, "parameters: a parameter that depends on another"),
        ({"values": [{"name": "sgd", "momentum": {"min": 0.1, "max": 0.9}}]}, "write one sweep for each branch"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(keys, said):
    _, problems = parse({"model": {"parameters": {"x": keys}}})
    (problem,) = problems
    assert problem.path == "parameters.model.parameters.x" and said in str(problem)


def test_nested_parameters_have_dotted_names():
    parameters, _ = parse(
        {"optim": {"parameters": {"lr": {"value": 1}, "name": {"values": ["adam", "sgd"]}}}, "width": {"value": 2}}
    )
    assert [parameter.name for parameter in parameters] == ["optim.lr", "optim.name", "width"]


def test_a_grid_has_every_combination_once():
    parameters, _ = parse(
        {
            "a": {"values": ["x", "y"]},
            "b": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0.5},
            "c": {"min": 3, "max": 4},
        }
    )
    points = [tuple(point.values()) for point in grid(parameters)]
    assert points[:2] == [("x", 0.0, 3), ("x", 0.0, 4)] and len(points) == len(set(points)) == 12
    with pytest.raises(ValueError, match="grid search needs a list of values for uniform"):
        list(grid(parse({"a": {"min": 0.0, "max": 1.0}})[0]))
