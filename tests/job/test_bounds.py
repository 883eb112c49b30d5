"""Every number of a job has a bound: at it a job is taken, above it the bound and its reason are said."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job, schema

WHOLE = {
    "num_nodes": 10_000,
    "processes_per_node": 1024,
    "resources.disk_gb": 1_000_000,
    "resources.cpus": 100_000,
    "fit.steps": 10**12,
    "parallelism.microbatches": 100_000,
    "checkpoint.keep": 1_000_000,
    "retry.max_attempts": 9999,
}
TEXTS = {
    "resources.accelerators": ("A100:1024", "A100:1025", "A100:5000000"),
    "resources.memory": ("1000TB", "1001TB", "9" * 400 + "TB"),
    "limits.max_runtime": ("3650d", "3651d", "99999999999999d"),
    "limits.max_cost": ("1000000000 USD", "1000000001 USD", "9" * 400 + " USD"),
    "checkpoint.every": ("999999999999 steps", "1000000000000 steps", "9" * 400 + " steps"),
}
LISTS = {"args": 10_000, "after": 100, "resume_args": 10_000, "keep": 10_000, "target": 100, "allow_large": 10_000}
MAPPINGS = {"labels": 100, "env": 10_000, "metrics": 100, "hyperparameters": 10_000}


def made(path: str, value: Any) -> Job:
    section, _, key = path.partition(".")
    others = {"fit": {"model": "m", "batch": 1, "sequence": 1}}.get(section, {})
    return Job(**{"name": "j", "entrypoint": "train.py", section: {**others, key: value} if key else value})


def refusal(path: str, value: Any) -> str:
    with pytest.raises(BadJob) as caught:
        made(path, value)
    return "\n".join(f"{problem.path}: {problem.message} ({problem.hint})" for problem in caught.value.problems)


@pytest.mark.parametrize(("path", "most"), WHOLE.items())
def test_a_whole_number_at_its_bound_is_taken_and_one_above_is_refused_with_the_reason(path: str, most: int) -> None:
    for number in (1, most - 1, most):
        made(path, number)
    for number in (most + 1, 10**5000, 1e300, math.inf, math.nan):
        said = refusal(path, number)
        assert f"{path}: must be at most {most:,}" in said
        assert not said.endswith("()")
    assert "must be at least 1" in refusal(path, 0)


@pytest.mark.parametrize(("path", "texts"), TEXTS.items())
def test_a_size_a_duration_and_a_count_of_gpus_have_bounds(path: str, texts: tuple[str, str, str]) -> None:
    made(path, texts[0])
    for text in texts[1:]:
        assert refusal(path, text).startswith(f"{path}: ")


def test_processes_of_all_nodes_have_a_bound() -> None:
    assert Job(entrypoint="t.py", num_nodes=10_000, processes_per_node=10).world_size == 100_000
    with pytest.raises(BadJob, match="10,000 nodes x 11 processes make 110,000 processes; at most 100,000 are allowed"):
        Job(entrypoint="t.py", num_nodes=10_000, processes_per_node=11)
    with pytest.raises(BadJob, match="9,000 nodes x 1,000 processes"):
        Job(entrypoint="t.py", num_nodes=9000, resources={"accelerators": "A100:1000"})


def test_a_price_has_a_bound() -> None:
    made("resources.usd_per_hour", 100_000)
    for price in (100_001, 10**400, math.inf, math.nan):
        assert "must be at most 100,000" in refusal("resources.usd_per_hour", price)


@pytest.mark.parametrize(("key", "most"), [*LISTS.items(), *MAPPINGS.items()])
def test_lists_and_mappings_have_bounds(key: str, most: int) -> None:
    def entries(count: int) -> Any:
        names = [f"n{number}" for number in range(count)]
        return names if key in LISTS else dict.fromkeys(names, "(.)")

    made(key, entries(most))
    assert f"{key}: has {most + 1:,} entries; at most {most:,} are allowed" in refusal(key, entries(most + 1))


def test_candidates_have_a_bound() -> None:
    targets, kinds = [f"t{number}" for number in range(11)], [f"G{number}" for number in range(10)]
    Job(entrypoint="t.py", target=targets[:10], resources={"accelerators": kinds})
    with pytest.raises(BadJob, match="11 targets x 10 accelerators are more than 100 candidates"):
        Job(entrypoint="t.py", target=targets, resources={"accelerators": kinds})


def _numeric() -> list[str]:
    """Return the paths of all keys that the schema says are numbers."""
    whole, found = schema(), []
    parts = [("", whole)] + [
        (f"{key}.", whole["$defs"][key.capitalize()]) for key in ("resources", "parallelism", "fit")
    ]
    parts += [(f"{key}.", whole["$defs"][key.capitalize()]) for key in ("limits", "checkpoint", "retry")]
    for prefix, part in parts:
        for key, value in part["properties"].items():
            forms = (value, *value.get("anyOf", ()))
            for form in forms:
                if {"type": "string"} not in forms and form.get("type") in ("integer", "number"):
                    found.append(prefix + key)
                    assert "maximum" in form, f"{prefix}{key} has no bound"
    return found


NUMBERS = _numeric()


def test_the_schema_bounds_every_number() -> None:
    assert {"num_nodes", "resources.usd_per_hour", "fit.batch", "retry.max_attempts"} <= set(NUMBERS)
    assert schema()["properties"]["num_nodes"]["maximum"] == 10_000


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*NUMBERS, "limits.max_runtime", "resources.memory", "checkpoint.every", "limits.max_cost"]),
    st.integers() | st.floats() | st.integers(0, 6000).map(lambda digits: 10**digits) | st.integers(1, 20_000),
)
@example("checkpoint.every", 10**5000)
@example("limits.max_cost", 10**5000)
def test_any_number_is_taken_or_refused(path: str, number: float) -> None:
    try:
        job = made(path, number)
    except BadJob as error:
        assert error.problems
    else:
        assert job.world_size <= 100_000
