"""Documents: laid over each other, every value keeps its place."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.job.document import Document, Mark, read_yaml, written


def test_the_stronger_document_wins_value_by_value():
    whole = read_yaml("a: {x: 1, y: 2}\nb: [1, 2]\nc: {z: 1}", "weak")
    strong = read_yaml("a: {y: 0x1F}\n\nb: [3]\nc: text\nd: 4", "strong")
    before = copy.deepcopy(strong)
    whole.overlay(strong)
    assert whole.value == {"a": {"x": 1, "y": 31}, "b": [3], "c": "text", "d": 4}
    assert whole.mark(("a", "x")) == Mark("weak", 1, "1")
    assert whole.mark(("a", "y")) == Mark("strong", 1, "0x1F")
    assert whole.mark(("b", 0)) == Mark("strong", 3, "3")
    assert ("b", 1) not in whole.marks and ("c", "z") not in whole.marks
    whole.put(("a", "y"), Document.of(5, "--set"))
    assert strong == before  # nothing is shared


def test_problems_travel_along():
    whole = Document.of({}, "")
    whole.overlay(read_yaml("a: 1\na: 2", "f"))
    assert [problem.line for problem in whole.problems] == [2]


def test_put_makes_its_way():
    made = Document()
    made.put(("a", "b", "c"), Document.of({"d": [1]}, "--set"))
    assert made.value == {"a": {"b": {"c": {"d": [1]}}}}
    assert made.mark(("a", "b")).file == made.mark(("a", "b", "c", "d", 0)).file == "--set"
    made.put(("a", "b"), Document.of("x", "--set"))
    assert made.value == {"a": {"b": "x"}} and ("a", "b", "c") not in made.marks
    with pytest.raises(BadJob, match="a.b is not a mapping"):
        made.put(("a", "b", "c"), Document.of(1, "--set"))
    made.put(("n",), Document.of(None, ""))
    made.put(("n", "m"), Document.of(1, ""))
    assert made.value["n"] == {"m": 1}


def test_python_values_are_copied():
    data = {"a": {"b": [1, True, None, 0.5]}, "t": (1, 2), "p": Path("/x")}
    made = Document.of(data, "Job", {("a",): 7})
    assert made.value == {"a": {"b": [1, True, None, 0.5]}, "t": [1, 2], "p": "/x"}
    made.value["a"]["b"].append(2)
    assert data["a"]["b"] == [1, True, None, 0.5]
    assert [made.mark(("a", "b", at)).text for at in range(4)] == ["1", "true", "null", "0.5"]
    assert made.mark(("a", "b", 0)).line == 7 and made.mark(("t", 0)).line is None


def test_how_scalars_are_written():
    assert [written(value) for value in (None, True, False, 1, 1.5, "x")] == ["null", "true", "false", "1", "1.5", "x"]


def test_the_nearest_mark():
    made = read_yaml("a:\n  b: 1", "f")
    assert made.mark(("a", "b", "c", 3)).line == 2
    assert made.mark(("q",)).line == 1
    assert Document({}).mark(("q",)) == Mark("")
