"""Placeholders are replaced on the node; every other text with braces arrives byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.job import placeholders as planned
from tests.entrypoints.training import ENTRYPOINTS

from launcher import placeholders  # isort: skip

assert ENTRYPOINTS
VALUES = {
    "model_dir": "/run/model",
    "output_dir": "/run/outputs",
    "checkpoint_dir": "/run/checkpoints",
    "run_id": "r-1",
    "attempt": "2",
    "input:data": "/inputs/data",
}


def test_both_sides_have_the_same_pattern():
    assert planned.PATTERN == placeholders.PATTERN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{model_dir}", "/run/model"),
        ("--out={model_dir}/best", "--out=/run/model/best"),
        ("{checkpoint_dir}:{output_dir}", "/run/checkpoints:/run/outputs"),
        ("{run_id}-{attempt}", "r-1-2"),
        ("{input:data}/train.csv", "/inputs/data/train.csv"),
        ("{{model_dir}}", "{model_dir}"),
        ("{{input:data}}", "{input:data}"),
        ('{"out": "{model_dir}"}', '{"out": "/run/model"}'),
        ("{input:other}", "{input:other}"),
    ],
)
def test_what_is_replaced(text: str, expected: str):
    assert placeholders.fill(text, VALUES) == expected
    assert planned.used(text)


@pytest.mark.parametrize(
    "text",
    [
        "{epoch:02d}-{val_loss:.2f}.pt", "{}", "{{}}", "{ model_dir }", "{MODEL_DIR}", "${model_dir", "{model_dir", "{model}",
        "{input:}", "{input:9a}", "{input}", json.dumps({"a": {"b": {}}}), "{{ .Values.x }}", "{% if x %}", "{checkpoint}",
    ],
)  # fmt: skip
def test_what_arrives_as_it_is(text: str):
    assert placeholders.fill(text, VALUES) == text
    assert not planned.used(text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='{}model_dirnputa:1 "é\n', max_size=30))
def test_a_text_is_changed_only_where_it_is_used(text: str):
    assert planned.used(text) or placeholders.fill(text, VALUES) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*VALUES, "x", "input:other"]), max_size=4), st.booleans())
def test_doubled_braces_are_the_literal(names: list[str], doubled: bool):
    text = "|".join(f"{{{{{name}}}}}" if doubled else f"{{{name}}}" for name in names)
    expected = [f"{{{name}}}" if doubled and name != "x" else text.split("|")[at] for at, name in enumerate(names)]
    if not doubled:
        expected = [VALUES.get(name, f"{{{name}}}") for name in names]
    assert placeholders.fill(text, VALUES) == "|".join(expected)
