"""Trials that others have beaten are stopped: Hyperband as W&B's own package does it, ASHA and the median rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.sweeps.early_stop import EarlyStop

WANDB = json.loads((Path(__file__).parent / "wandb.json").read_text())


def stopped(rule: EarlyStop, histories: list[list[float]]) -> list[int]:
    return [
        at
        for at, mine in enumerate(histories)
        if mine and rule.stops(mine, [other for n, other in enumerate(histories) if n != at])
    ]


def test_hyperband_stops_what_wandb_stops():
    counts = set()
    for keys, histories, expected in WANDB["stopped"]:
        assert stopped(EarlyStop.parse(keys), histories) == expected, keys
        counts.add(len(expected))
    assert len(counts) > 3, "the cases differ"


def test_asha_keeps_the_best_fraction_of_each_rung():
    rule = EarlyStop.parse({"type": "asha", "min_iter": 2, "max_iter": 16, "eta": 4})
    assert rule.bands == (2, 8) and rule.strict
    histories = [[9.0, float(value)] for value in range(8)]
    assert stopped(rule, histories) == [3, 4, 5, 6, 7]
    assert stopped(rule, [[9.0]] * 8) == [], "before its first rung"


def test_the_median_rule_waits_for_others():
    rule = EarlyStop.parse({"type": "median", "min_iter": 2, "startup_trials": 3})
    assert stopped(rule, [[5.0, 5.0], [1.0, 1.0], [2.0, 2.0]]) == [], "too few others"
    assert stopped(rule, [[5.0, 5.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]) == [0, 3]
    assert stopped(rule, [[5.0], [1.0], [2.0], [3.0]]) == [], "before min_iter"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"type": "sha"}, "needs a type"),
        ({"type": "hyperband"}, "min_iter, or max_iter and s"),
        ({"type": "hyperband", "min_iter": 0}, "whole number from 1"),
        ({"type": "hyperband", "min_iter": 1, "eta": 1}, "above 1"),
        ({"type": "median", "eta": 3}, "does not take eta"),
        ({"type": "hyperband", "max_iter": 2, "s": 1, "eta": 3}, "no brackets"),
    ],
)
def test_a_rule_that_cannot_be(keys, said):
    with pytest.raises(ValueError, match=said):
        EarlyStop.parse(keys)
