"""The best evaluation, and when it is no longer worth going on."""

from __future__ import annotations

import math

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer.arguments import Arguments  # isort: skip
from trainer.best import BestEvaluation  # isort: skip

assert ENTRYPOINTS


def heard(values: list[float], **more) -> tuple[list[bool], list[bool]]:
    best = BestEvaluation(Arguments(eval_strategy="steps", **more))
    better, enough = [], []
    for value in values:
        better.append(best.update({best.name: value}))
        enough.append(best.enough)
        again = BestEvaluation(Arguments(eval_strategy="steps", **more))
        again.set_state(best.state())
        assert (again.value, again.enough) == (best.value, best.enough)
        best = again
    return better, enough


@pytest.mark.parametrize(
    "name, greater, sign", [("loss", "auto", 1), ("f1", "auto", -1), ("wer", "false", 1), ("loss", "true", -1)]
)
def test_lower_losses_and_higher_accuracies_are_better(name: str, greater: str, sign: int):
    values = [sign * value for value in (5, 4, 4, 4.5, 3, 3.5, 3.2)]
    better, enough = heard(values, metric_for_best_model=name, greater_is_better=greater, early_stopping_patience=2)
    assert better == [True, True, False, False, True, False, False]
    assert enough == [False, False, False, True, False, False, True]


def test_a_gain_below_the_threshold_is_best_but_no_reason_to_go_on():
    better, enough = heard([5, 4.95, 4.9, 3], early_stopping_patience=2, early_stopping_threshold=0.1)
    assert better == [True, True, True, True] and enough == [False, False, True, False]


def test_without_patience_it_never_ends_and_nan_is_never_best():
    better, enough = heard([5, math.nan, 6, 7])
    assert better == [True, False, False, False] and not any(enough)


def test_a_first_evaluation_that_is_nan_is_not_the_best_for_ever():
    better, enough = heard([math.nan, 6, 5, 4, 3], early_stopping_patience=2)
    assert better == [False, True, True, True, True] and not any(enough)
    older = BestEvaluation(Arguments(eval_strategy="steps"))
    older.set_state({"value": math.nan, "checkpoint": "", "in_vain": 0})  # as such a checkpoint has it
    assert older.update({older.name: 2.0})
