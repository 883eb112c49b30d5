"""The arithmetic against torch's own account of the trainer's step (oracle.csv, by oracle.py)."""

from __future__ import annotations

import pytest

from cloudtrain.forecast import fit, memory
from cloudtrain.forecast.training import MEASURED
from tests.forecast import cases
from tests.forecast.cases import COUNTED


def test_there_are_enough_cases_and_the_oracle_counted_each():
    assert len(cases.ADJUSTED) >= 60 and len(cases.HELD_OUT) >= 20
    assert list(COUNTED) == list(cases.CASES)
    families = {case.config["model_type"] for case in cases.CASES.values()}
    assert families == set(MEASURED), "what the forecast calls measured is what the oracle has counted"


@pytest.mark.parametrize("name", cases.CASES)
def test_the_arithmetic_is_within_3_percent_of_the_oracle(name: str):
    case = cases.CASES[name]
    assert memory.estimate(case.shape, case.step).total == pytest.approx(COUNTED[name], rel=0.03)
    assert fit.LOW * memory.estimate(case.shape, case.step).total <= COUNTED[name], "no less is needed"
