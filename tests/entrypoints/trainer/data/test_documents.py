"""Documents from every kind of place, in an order that no machine changes."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer.data import documents as data  # isort: skip
from trainer.errors import Unsupported  # isort: skip

assert ENTRYPOINTS
PLAIN = data.Columns()
LABELLED = data.Columns(label="label")


def told(documents: list[data.Document]) -> list[str]:
    return sorted(document.read() for document in documents)


def test_files_folders_globs_and_inputs(tmp_path: Path):
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("one")
    (tmp_path / "in" / "below" / "b.md").write_text("two")
    (tmp_path / "in" / ".hidden").write_text("no")
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG\0\0")
    folder = tmp_path / "in"
    assert told(data.load([str(folder)], PLAIN, {})) == ["one", "two"]
    assert told(data.load([f"{folder}/**/*.*d"], PLAIN, {})) == ["two"]
    assert told(data.load([f"{folder}/a.txt"], PLAIN, {})) == ["one"]
    assert told(data.load(["input:train"], PLAIN, {"train": str(folder)})) == ["one", "two"]
    assert told(data.load(["input:train/below"], PLAIN, {"train": str(folder)})) == ["two"]
    with pytest.raises(Unsupported, match="no input 'tset'; it has: train"):
        data.load(["input:tset"], PLAIN, {"train": str(folder)})
    with pytest.raises(Unsupported, match="is not text"):
        data.load([f"{folder}/picture.png"], PLAIN, {})


def test_rows_of_every_format(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": f'line {number}, "quoted"\nnext', "label": number % 2} for number in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name, mark in (("a.csv", ","), ("a.tsv", "\t")):
        with open(tmp_path / name, "w", newline="") as stream:
            writer = csv.DictWriter(stream, ["text", "label"], delimiter=mark)
            writer.writeheader()
            writer.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"):
        found = data.load([str(tmp_path / name)], LABELLED, {})
        assert told(found) == [row["text"] for row in rows], name
        assert sorted(str(document.label) for document in found) == ["0", "0", "0", "1", "1"], name


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.jsonl", '{"txt": "x"}', "a.jsonl:1: the row has no 'text'; it has: txt"),
        ("a.jsonl", '\n{"text": ', "a.jsonl:2: is not JSON: Expecting value at column 10"),
        ("a.jsonl", '{"text": "", "label": 1}\n\n{}', "a.jsonl:3: the row has no 'text'; it has: "),
        ("a.json", "[1]", "no columns at all"),
        ("a.csv", "text\nx\n", "a.csv:1: the row has no 'label'; it has: text"),
        ("a.txt", "words", "has no labels"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, content: str, sentence: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(Unsupported, match=sentence):
        data.load([str(tmp_path / name)], LABELLED, {})


def test_absent_and_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unsupported, match="there is no text in"):
        data.load([str(tmp_path / "empty")], PLAIN, {})
    for name in ("missing.txt", "./missing", "missing/*.txt", "a/b/c"):
        with pytest.raises(Unsupported, match="does not exist below"):
            data.load([name], PLAIN, {})


def test_the_order_is_the_same_however_the_machine_lists_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in (*"abcdefgh", "z/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text {name}")
    first = [document.key for document in data.load([str(tmp_path)], PLAIN, {})]
    walk = os.walk

    def backwards(folder):
        for root, folders, files in walk(folder):
            yield root, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert [document.key for document in data.load([str(tmp_path)], PLAIN, {})] == first
    assert first != sorted(first) and sorted(first) == sorted((*"abcdefgh", "z/a"))


def test_held_out_documents_are_not_trained_on():
    documents = [data.Document(str(number), str(number).__str__) for number in range(40)]
    train, held = data.hold_out(documents, 10)
    assert len(held) == 4 and told(train + held) == told(documents)
    assert data.hold_out(documents, 0) == (documents, [])
    assert [len(part) for part in data.hold_out(documents[:2], 90)] == [1, 1]


def test_the_only_document_is_cut_at_a_line():
    text = "".join(f"line {number}\n" for number in range(100))
    [first], [last] = data.hold_out([data.Document("a", lambda: text)], 10)
    assert first.read() + last.read() == text
    assert first.read().endswith("\n") and 50 < len(last.read()) < 150
    assert data.hold_out([data.Document("a", lambda: "one line")], 10)[1] == []


def test_bytes_are_bounded_and_characters_whole():
    documents = [data.Document(str(number), lambda: "äöü") for number in range(5)]
    assert list(data.take(documents)) == ["äöü"] * 5
    assert list(data.take(documents, 9)) == ["äöü", "ä"]
    assert list(data.take(documents, 6)) == ["äöü"]
    assert list(data.take(documents, 0)) == []


def test_the_standard_library_is_text_that_every_machine_has():
    found = data.load([data.STDLIB], PLAIN, {})
    keys = {document.key for document in found}
    assert {"os.py", "json/decoder.py"} <= keys
    assert not any("site-packages" in key or key.startswith(("test/", "encodings/")) for key in keys)
    assert sum(len(document.read()) for document in found) > 4_000_000
