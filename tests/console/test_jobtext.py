"""A job file's nodes are written as YAML 1.2 that reads as it was written."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudtrain.console import jobtext
from cloudtrain.console.jobtext import Plain, Table
from cloudtrain.errors import BadJob
from cloudtrain.job.document import Document, read_yaml

# What YAML, old readers of it, or a shell would take for something else
ODD = [
    "", " ", "no", "on", "y", "1:30", "0123", "1e-4", "1_000", "2024-01-01", ".inf", ".nan", "null", "~", "true", "<<",
    "=", "---", "...", "- a", "# x", "a: b", "a #b", "a:", ":a", "?", "? a", "*a", "&a", "!x", "!!int 3", "%d", "@a",
    "`", "'", '"', "\\", "[", "{a", "a,b", " a", "a ", "\t", "\n", "a\nb\n", "\r", "\0", "\x07", "\x85", "\u2028",
    "\ufeff", "\ufffe", "é", "漢", "\U0001f600", "x" * 2000, "$HOME", "${x}", "<script>alert(1)</script>", "a=b", ".", "..",
]  # fmt: skip
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(ODD)
keys = st.sampled_from(["a", "b", "0", "", "a b", "no", "1e-4"])
scalars = texts | st.integers() | st.floats() | st.booleans() | st.none()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=10
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(texts, values, max_size=4))
def test_whatever_is_written_is_read_again(value):
    document = Document.of(value, "x")
    table = jobtext.from_document(document)
    read = read_yaml(jobtext.dump(table), "x")
    assert read.problems == []
    assert repr(read.value) == repr(document.value)  # repr: nan is nan, 1 is not 1.0
    assert jobtext.from_document(read) == table


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(keys, values, max_size=4), st.dictionaries(keys, values, max_size=4), st.data())
def test_an_edited_file_says_what_it_was_edited_to_and_keeps_its_comments(old, new, data):
    before, fresh = (jobtext.from_document(Document.of(value, "x")) for value in (old, new))
    kept = [row for row in before if row[0] not in new and data.draw(st.booleans())]
    after = Table(data.draw(st.permutations([*kept, *fresh])))
    lines = [f"# about {number}\n{jobtext.dump(Table([row]))}" for number, row in enumerate(before)]
    text = "# a head\n\nfirst: 1 # the first\n" + "".join(lines)
    first = ("first", Plain("1"))
    edited = jobtext.edit(text, Table([first, *before]), Table([first, *after]))
    assert jobtext.from_document(read_yaml(edited)) == [first, *after]
    numbers = [number for number, row in enumerate(before) if row in kept]
    assert [f"# about {number}" in edited for number in numbers] == [True] * len(numbers)
    assert "# a head" in edited and "first: 1 # the first" in edited


@pytest.mark.parametrize(
    ("text", "comments"),
    [
        ("name: a\nenv: # about env\n  A: b\n", ["# about env"]),
        ("name: a\nresources:  # gpu\n  accelerators: A100:1\n  # in\n", ["# gpu", "# in"]),
        ("name: a\nargs: # about args\n  - b\n", ["# about args"]),
        ("name: a\nenv: &e\n  A: b\nhyperparameters: *e\n", []),
    ],
)
@pytest.mark.parametrize("changed", ["name", "env", "new"])
def test_a_file_with_comments_behind_keys_or_an_alias_can_be_edited(text, comments, changed):
    before = jobtext.from_document(read_yaml(text))
    after = Table([*(row for row in before if row[0] != changed), (changed, Plain("2"))])
    edited = jobtext.edit(text, before, after)
    assert jobtext.from_document(read_yaml(edited)) == after
    if changed != "env":
        assert [each for each in comments if each not in edited] == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_a_value_that_is_shown_alone_is_parsed_as_itself(value):
    node = jobtext.from_document(Document.of({"k": value}, "x")).get("k")
    assert jobtext.parse(jobtext.format_node(node)) == node


def test_numbers_keep_their_text():
    text = "a: 1e-4\nb: 0123\nc: 1.10\nd: 0x1F\ne: ~\nf: TRUE\ng: [3.0e-4, 0o7, -.inf, .NaN]\nh: !!float 5\n"
    table = jobtext.from_document(read_yaml(text))
    assert jobtext.dump(table) == text
    assert table.get("h") == Plain("5", "!!float")


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("1e-4", Plain("1e-4")),
        ("true", Plain("true")),
        ("yes", "yes"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("a: b", "a: b"),
        ('"1e-4"', "1e-4"),
        ("[2, 4]", [Plain("2"), Plain("4")]),
        ("{uri: x, mode: stream}", Table([("uri", "x"), ("mode", "stream")])),
    ],
)
def test_what_is_typed_means_what_set_would_take(text, node):
    assert jobtext.parse(text) == node


def test_an_open_bracket_is_a_problem():
    with pytest.raises(BadJob):
        jobtext.parse("[1, 2")


def test_a_file_looks_as_a_person_would_write_it():
    table = Table(
        [
            ("name", "tiny-lm"),
            ("source", "."),
            ("hyperparameters", Table([("learning_rate", Plain("3.0e-4")), ("layers", [Plain("2"), Plain("4")])])),
            ("args", ["--tag", "a b", "no", "x: y"]),
            ("limits", Table([("max_runtime", "24h")])),
            ("inputs", Table([("train", "s3://bucket/train/")])),
            ("env", Table()),
        ]
    )
    assert jobtext.dump(table) == (
        "name: tiny-lm\nsource: .\nhyperparameters:\n  learning_rate: 3.0e-4\n  layers: [2, 4]\n"
        'args: ["--tag", a b, "no", "x: y"]\nlimits:\n  max_runtime: 24h\ninputs:\n  train: s3://bucket/train/\nenv: {}\n'
    )


def test_a_key_that_is_given_twice_is_still_there():
    read = read_yaml(jobtext.dump(Table([("env", Table([("A", "1"), ("A", "2")]))])))
    assert "given twice" in read.problems[0].message
