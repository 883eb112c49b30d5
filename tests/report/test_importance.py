"""The importance of hyperparameters, on functions of which it is known."""

from __future__ import annotations

import math
import random
import sys

import pytest

from cloudtrain.errors import MissingExtra
from cloudtrain.report.importance import importance

ROWS = [
    {"lr": 10 ** choose.uniform(-5, -1), "width": choose.choice([64, 128]), "act": choose.choice(["relu", "silu"]), "epochs": 3}
    for choose in [random.Random(3)]
    for _ in range(40)
]  # fmt: skip


def loss(row: dict) -> float:
    return abs(math.log10(row["lr"]) + 3)


def test_the_rate_that_decides_comes_first_whatever_its_scale():
    found = importance(ROWS, [loss(row) for row in ROWS])
    assert next(iter(found)) == "lr" and found["lr"] > 0.6
    assert found.keys() == {"lr", "width", "act"}, "what is the same for all has no share"
    assert sum(found.values()) == pytest.approx(1)
    assert importance([{**row, "lr": math.log(row["lr"])} for row in ROWS], [loss(row) for row in ROWS]) == found


def test_a_choice_that_decides_comes_first():
    noise = random.Random(4)
    found = importance(ROWS, [(row["act"] == "relu") + noise.random() / 100 for row in ROWS])
    assert next(iter(found)) == "act" and found["act"] > 0.9


def test_runs_without_a_value_do_not_count_and_few_runs_say_nothing():
    values: list[float | None] = [loss(row) for row in ROWS]
    expected = importance(ROWS, values)
    strange = [{"lr": 5.0, "width": None}, {"lr": "x"}]
    assert importance([*ROWS, *strange], [*values, None, math.nan]) == expected
    assert importance(ROWS[:7], values[:7]) == {} == importance([{"lr": 1}] * 40, values)
    mixed = [{**row, "width": None if at % 2 else row["width"]} for at, row in enumerate(ROWS)]
    assert importance(mixed, values).keys() == expected.keys()


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match="sweep"):
        importance(ROWS, [loss(row) for row in ROWS])
