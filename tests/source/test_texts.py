"""The text of a source is read once, and not more of it than is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cloudtrain.source import texts
from cloudtrain.source.texts import Texts


def test_the_entry_comes_first_and_only_text_is_read(tmp_path: Path):
    for name in ("a.py", "b.yaml", "z.py", "weights.bin"):
        (tmp_path / name).write_text(name)
    read = Texts(tmp_path, ["b.yaml", "a.py", "z.py", "weights.bin", "gone.py"], "z.py")
    assert list(read.files) == ["z.py", "a.py", "b.yaml"] and not read.complete  # gone.py could not be read
    (tmp_path / "a.py").write_text("other")
    assert read.files["a.py"] == "a.py"  # not again


def test_no_more_is_read_than_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(texts, "LONGEST", 10)
    monkeypatch.setattr(texts, "MOST_BYTES", 15)
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text("x" * 12)
    read = Texts(tmp_path, ["a.py", "b.py", "c.py"])
    assert {name: len(text) for name, text in read.files.items()} == {"a.py": 10, "b.py": 5} and not read.complete
    assert [len(read.read(name)) for name in ("a.py", "b.py", "c.py", "gone.py")] == [10, 10, 10, 0]
    whole = Texts(tmp_path, [])
    assert whole.files == {} and whole.complete


def test_a_match_says_where_and_is_no_comment(tmp_path: Path):
    (tmp_path / "a.py").write_text("# SM_X\nprint(1)\nx = 'SM_Y'\n")
    found = Texts(tmp_path, ["a.py"]).find(re.compile(r"SM_\w"))
    assert found is not None and (found.place, found.text) == ("a.py:3", "SM_Y")
