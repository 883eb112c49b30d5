"""Rows are read from an Arrow table on disk, which the processes of a machine share and whose file has no name afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer.data import documents, row_table  # isort: skip
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


@pytest.mark.parametrize("ending", ["parquet", "json", "jsonl"])
@pytest.mark.parametrize("place", ["none", "cache"])
def test_rows_of_the_table_are_those_of_the_file(tmp_path: Path, monkeypatch, ending: str, place: str):
    monkeypatch.setattr(row_table, "BATCH_BYTES", 1000)  # several record batches
    monkeypatch.setattr(row_table.tempfile, "tempdir", str(tmp_path / "none"))
    file, cache = write(tmp_path, ending), tmp_path / place
    found = documents.load([str(file)], LABELLED, {}, "none" if place == "none" else str(cache))
    texts = [row["text"].replace("\ud83d", "d") if ending == "parquet" else row["text"] for row in rows(50)]
    by_number = {int(key.partition("#")[2]): each for key, *each in told(found)}
    line = (lambda number: 1) if ending == "json" else (lambda number: number + 1)
    assert len(found) == 50 and {number: each[:2] for number, each in by_number.items()} == {
        number: [text, "abc"[number % 3]] for number, text in enumerate(texts)
    }
    if ending != "json":
        assert all(where == f"{file}:{line(number)}" for number, (_, _, where) in by_number.items())
    assert cache.is_dir() and not list(cache.iterdir()), "the file has no name any more"
    assert told(documents.Documents(found.table, found.order[::-1])) == told(found)[::-1]


def test_text_files_stay_where_they_are(tmp_path: Path):
    (tmp_path / "a.txt").write_text("words")
    [found] = documents.load([str(tmp_path)], documents.Columns(), {})
    (tmp_path / "a.txt").write_text("other words")
    assert found.read() == "other words" and found.where == "a.txt"
    assert documents.load([str(tmp_path)], documents.Columns(), {}).table["text"].to_pylist() == [None]


PROCESS = """
import json, os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import torch.distributed as dist
from trainer.data import documents, row_table, shared_reading

read, reads = shared_reading.document_of, []
shared_reading.document_of = lambda *args: (reads.append(args[1]), read(*args))[1]
dist.init_process_group("gloo")
try:
    found = documents.load([sys.argv[2]], documents.Columns(label="label"), {}, sys.argv[3])
    told = sorted(each.read() for each in found)
except Exception as error:
    told = str(error)
everything = [None] * 2
dist.all_gather_object(everything, (len(reads), told, os.listdir(sys.argv[3])))
if dist.get_rank() == 0:
    print("FOUND", json.dumps(everything), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("wrong", [False, True])
def test_the_first_process_of_a_machine_reads_for_the_others(tmp_path: Path, wrong: bool):
    file, cache = write(tmp_path, "json"), tmp_path / "cache"
    if wrong:
        file.write_text('[{"text": "a", "label": 1}, {"text": "b"}]')
    (tmp_path / "ranks.py").write_text(PROCESS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "ranks.py"), str(ENTRYPOINTS), str(file), str(cache)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    (first, told_first, left), (second, told_second, _) = json.loads(line.removeprefix("FOUND "))
    assert first > 0 and second == 0 and left == []
    assert told_first == told_second
    assert told_first == (
        f"{file}:2: the row has no 'label'; it has: text (set label_column, or correct the data)"
        if wrong
        else sorted(row["text"] for row in rows(50))
    )


def test_rows_are_in_memory_where_no_file_can_be_written_and_the_log_says_so(tmp_path: Path, capsys):
    file = write(tmp_path, "json")
    expected = told(documents.load([str(file)], LABELLED, {}))
    assert told(documents.load([str(file)], LABELLED, {}, str(file / "below"))) == expected
    assert capsys.readouterr().out == f"the rows are in memory: {file / 'below'}: Not a directory\n"


def test_what_a_killed_process_left_is_deleted_after_a_day(tmp_path: Path):
    file, cache = write(tmp_path, "json"), tmp_path / "cache"
    cache.mkdir()
    for name in ("rows-old.arrow", "rows-new.arrow"):
        (cache / name).touch()
    os.utime(cache / "rows-old.arrow", (1.0, 1.0))
    documents.load([str(file)], LABELLED, {}, str(cache))
    assert [each.name for each in cache.iterdir()] == ["rows-new.arrow"]


def test_a_wrong_row_is_refused_and_leaves_no_file(tmp_path: Path):
    file = tmp_path / "rows.json"
    file.write_text('[{"text": "a", "label": 1}, {"text": "b"}]')
    with pytest.raises(Unsupported, match=r"rows.json:2: the row has no 'label'; it has: text"):
        documents.load([str(file)], LABELLED, {}, str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").iterdir())


MEASURE = """
import sys
sys.path[:0] = [sys.argv[1]]
import pyarrow.parquet
from trainer.data import documents
def anonymous():
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("RssAnon"))
documents.load([sys.argv[2]], documents.Columns(), {})
before = anonymous()
found = documents.load([sys.argv[3]], documents.Columns(), {})
total = sum(len(document.read()) for document in found)
print(total, (anonymous() - before) * 1024)
"""


@pytest.mark.parametrize("ending", ["parquet", "json", "jsonl"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, ending: str):
    import pyarrow.parquet

    (tmp_path / "small").mkdir()
    small, large = write(tmp_path / "small", ending), tmp_path / f"rows.{ending}"
    made = ({"text": f"{number} " + "words " * 500} for number in range(40_000))
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(made)), large)
    else:
        with open(large, "w") as stream:
            for number, row in enumerate(made):
                stream.write(("," if number else "[") * (ending == "json") + json.dumps(row) + "\n")
            stream.write("]" if ending == "json" else "")
    command = [sys.executable, "-c", MEASURE, str(ENTRYPOINTS), str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    total, grown = map(int, done.stdout.split())
    assert total > 120_000_000 and grown < 0.75 * total
