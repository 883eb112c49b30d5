"""Rows of a .json file, read in chunks: the values and the errors of json.loads, whatever the chunk."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.entrypoints.training import ENTRYPOINTS

from trainer.data import json_rows  # isort: skip

assert ENTRYPOINTS
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
SHAPES = {
    "indent": st.sampled_from([None, 1]),
    "ascii": st.booleans(),
    "chunk": st.sampled_from([1, 2, 7, 40, 1 << 20]),
}


def read(file: Path) -> list:
    return list(json_rows.json_rows(file))


def outcome(file: Path) -> tuple:
    """Return the rows, or the line and message of the error."""
    try:
        return ("rows", read(file))
    except json_rows.NotJson as error:
        return ("error", error.line, str(error))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VALUES, max_size=6), st.fixed_dictionaries(SHAPES))
def test_the_rows_are_those_of_the_whole_file(tmp_path: Path, monkeypatch, rows, shape):
    monkeypatch.setattr(json_rows, "CHUNK", shape["chunk"])
    file = tmp_path / "a.json"
    text = json.dumps(rows, indent=shape["indent"], ensure_ascii=shape["ascii"])
    file.write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8", "surrogatepass"))
    assert read(file) == json.loads(text)


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[1,\n 2",
        "[1,\n 2]\n x",
        "[1\n 2]",
        "[1,\n]",
        '[{"a": 1},\n {"a": }, {"a": 2}]',
        '[{"a": 1},\n {"a": "b}]',
        '[{"a": 1}, {"a": "\\q"}]',
        '[\n\n{"a": tru}]',
        '{"a": 1}\n[2]',
        '\n {"a": 1',
        "nul",
    ],
)
def test_an_error_is_named_where_the_whole_file_has_it(tmp_path: Path, monkeypatch, text: str, chunk: int):
    monkeypatch.setattr(json_rows, "CHUNK", chunk)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    _, line, message = outcome(tmp_path / "a.json")
    assert (line, message) == (
        expected.value.lineno,
        f"is not JSON: {expected.value.msg} at column {expected.value.colno}",
    )


def test_rows_come_before_the_file_is_read_to_its_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(json_rows, "CHUNK", 100)
    (tmp_path / "a.json").write_text("[" + ", ".join(f'{{"a": {number}}}' for number in range(50)) + ", oh")
    assert [row["a"] for row in islice(json_rows.json_rows(tmp_path / "a.json"), 50)] == list(range(50))


def test_a_number_may_be_cut_where_a_chunk_ends(tmp_path: Path, monkeypatch):
    text = '[0.5, 12.25, 1e-5, 2E+10, -7, -Infinity, "\\ud83d\\ude00", true]'
    (tmp_path / "a.json").write_text(text)
    for chunk in range(1, 20):
        monkeypatch.setattr(json_rows, "CHUNK", chunk)
        assert read(tmp_path / "a.json") == json.loads(text)


def test_one_object_is_one_row(tmp_path: Path):
    (tmp_path / "a.json").write_text('\n{"a": [1, 2]}\n')
    assert read(tmp_path / "a.json") == [{"a": [1, 2]}]
