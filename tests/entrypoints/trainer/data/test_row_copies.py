"""Rows of parquet and .json files are read from copies on disk, which processes share and the last one deletes."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer.data import documents, json_rows, row_copies, row_files  # isort: skip
from trainer.errors import Unsupported  # isort: skip

assert ENTRYPOINTS
LABELLED = documents.Columns(label="label")


def rows(count: int, size: int = 5) -> list[dict]:
    draw = random.Random(7)
    texts = (" ".join(draw.choices(["ä", "b\n", "\ud83d", "c"], k=size)) for _ in range(count))
    return [{"text": text, "label": "abc"[number % 3]} for number, text in enumerate(texts)]


def write(folder: Path, ending: str, count: int = 50, size: int = 5) -> Path:
    import pyarrow.parquet

    file, made = folder / f"rows.{ending}", rows(count, size)
    if ending == "parquet":
        made = [row | {"text": row["text"].replace("\ud83d", "d")} for row in made]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), file)
    else:
        file.write_text(json.dumps(made) if ending == "json" else "".join(json.dumps(row) + "\n" for row in made))
    return file


def told(found) -> list[tuple]:
    return [(each.key, each.read(), each.label, each.where) for each in found]


@pytest.mark.parametrize("ending", ["parquet", "json"])
@pytest.mark.parametrize("place", ["none", "cache"])
def test_copied_rows_are_those_in_memory(tmp_path: Path, ending: str, place: str):
    file, cache = write(tmp_path, ending), "none" if place == "none" else str(tmp_path / "cache")
    found = documents.load([str(file)], LABELLED, {}, cache)
    in_memory = documents.Documents([list(row_files.rows_of(file, file.name, LABELLED))])
    assert told(found) == told(in_memory) and len(found) == 50
    assert isinstance(found.parts[0], row_copies.CopiedRows)
    assert told(documents.load([str(file)], LABELLED, {}, cache)) == told(found), "of the copy that is there"
    folder = found.parts[0].text.parent
    assert list(folder.glob("*.text"))
    del found
    gc.collect()
    assert not list(folder.glob("*.*")), "the copies are deleted"


@pytest.mark.parametrize("ending", ["parquet", "json"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch, ending: str):
    import pyarrow.parquet

    assert pyarrow.parquet.ParquetFile
    monkeypatch.setattr(json_rows, "CHUNK", 1 << 16)
    monkeypatch.setattr(row_files, "DECODED", 1 << 16)
    file = write(tmp_path, ending, 300, 3000)
    tracemalloc.start()
    found = documents.load([str(file)], LABELLED, {})
    total = sum(len(document.read()) for document in found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 1_500_000 and peak < total / 3


PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from trainer.data import documents, row_copies

def refused(file):
    raise AssertionError("the file was read again")

if sys.argv[4] == "second":
    row_copies.numbered_rows = refused
found = documents.load([sys.argv[2]], documents.Columns(label="label"), {}, sys.argv[3])
print(len("".join(each.read() for each in found)), flush=True)
sys.stdin.readline()
"""


def test_processes_share_a_copy_and_the_last_one_deletes_it(tmp_path: Path):
    file, cache = write(tmp_path, "parquet"), tmp_path / "cache"
    (cache / "rows").mkdir(parents=True)
    (cache / "rows" / "left.text").write_text("by a process that was killed")

    def start(which: str) -> subprocess.Popen:
        command = [sys.executable, "-c", PROCESS, str(ENTRYPOINTS), str(file), str(cache), which]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first = start("first")
    characters = first.stdout.readline()
    copies = sorted((cache / "rows").glob("*.text"))
    assert len(copies) == 1 and copies[0].name != "left.text"
    second = start("second")
    assert second.stdout.readline() == characters != ""
    first.communicate("\n", timeout=60)
    assert copies[0].exists(), "the second process still reads it"
    second.communicate("\n", timeout=60)
    assert [each.name for each in (cache / "rows").iterdir()] == ["lock"]
    assert first.returncode == second.returncode == 0


def test_a_changed_file_and_other_columns_have_copies_of_their_own(tmp_path: Path):
    file, cache = write(tmp_path, "json"), str(tmp_path / "cache")
    first = documents.load([str(file)], LABELLED, {}, cache)
    other = documents.load([str(file)], documents.Columns("label"), {}, cache)
    changed = file.read_text().replace("c", "C")  # of the same size
    file.write_text(changed)
    again = documents.load([str(file)], LABELLED, {}, cache)
    assert sorted(each.read() for each in again) == sorted(row["text"] for row in json.loads(changed))
    assert {each.read() for each in other} == {"a", "b", "c"} and told(first)[0][1].count(" ") >= 4


def test_rows_are_in_memory_where_no_copy_can_be_written_and_the_log_says_so(tmp_path: Path, monkeypatch, capsys):
    file, cache = write(tmp_path, "json"), tmp_path / "cache"
    expected = told(documents.load([str(file)], LABELLED, {}))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(row_copies.os, "replace", full)
    copies = row_copies.Copies(str(cache))
    assert sorted(told(copies.rows(file, file.name, LABELLED))) == sorted(expected)
    assert not list((cache / "rows").glob("*.text")), "the disk is not kept full"
    said = f"the rows of {file} are in memory: {cache}: No space left on device. Rows of jsonl stay in their file\n"
    assert capsys.readouterr().out == said


def test_a_wrong_row_is_refused_and_leaves_no_copy(tmp_path: Path):
    file = tmp_path / "rows.json"
    file.write_text('[{"text": "a", "label": 1}, {"text": "b"}]')
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"rows.json:2: the row has no 'label'; it has: text"):
            documents.load([str(file)], LABELLED, {}, str(tmp_path / "cache"))
    assert not list((tmp_path / "cache" / "rows").glob("*.text"))
