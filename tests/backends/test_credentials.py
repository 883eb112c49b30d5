"""Credentials that cannot be used are told apart, each with what helps: docs/credentials.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("boto3")

from cloudtrain.errors import BackendError
from tests.backends.credentials import CASES, FIGURES, create, row, world

TABLE = {each["case"]: each for each in json.loads(FIGURES.read_text())}


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_in_the_table(name: str, tmp_path: Path) -> None:
    assert row(name, tmp_path / "home") == TABLE[name], "python -m tests.backends.credentials"


def test_the_cases_are_told_apart() -> None:
    assert set(TABLE) == set(CASES) and len(TABLE) >= 24
    said = [(each["message"], each["hint"]) for each in TABLE.values()]
    assert len(set(said)) == len(said) and all(hint for _, hint in said)


@pytest.mark.parametrize(("age_s", "refusals", "tries"), [(5.0, 3, 3), (5.0, 99, 11), (70.0, 99, 0)])
def test_a_role_that_was_created_just_now_is_tried_again_for_a_minute(
    age_s: float, refusals: int, tries: int, tmp_path: Path
) -> None:
    with world(tmp_path / "home") as here:
        if refusals < 99:
            assert create(here, age_s, refusals) == ("arn", [5.0] * tries)
            return
        with pytest.raises(BackendError, match="cannot assume the role") as caught:
            create(here, age_s)
        assert "--policy trust" in caught.value.hint
