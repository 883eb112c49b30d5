"""Streams: every token once, the same global batches on any world, and the place in them to the token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.entrypoints.training import ranks

from trainer.data import documents, parts, shared_reading  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.labels import IGNORED  # isort: skip
from trainer.data.stream import StreamBatches, Texts  # isort: skip


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id = 0

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) for letter in text]}


def held(texts: list[str]) -> Iterator[documents.Document]:
    return (documents.Document("", lambda text=text: text) for text in texts)


def read(*args, **options) -> list[str]:
    return [document.read() for document in documents.stream(*args, **options)]


def batches(texts: list[str], size: int, per_device: int, accumulation: int, world: int, rank: int) -> StreamBatches:
    return StreamBatches(Texts(lambda epoch: held(texts), Letters(), size), per_device, accumulation, world, rank)


def steps(stream: StreamBatches, few: int = 10**6) -> list[tuple[list[int], dict[str, int]]]:
    """Return the tokens that a rank gets to learn in each step, and the place behind it."""
    found, source = [], iter(stream)
    for count in islice(stream.windows(), few):
        labels = torch.cat([next(source)["labels"].flatten() for _ in range(count)])
        stream.advance()
        found.append((labels[labels != IGNORED].tolist(), stream.place()))
    return found


def tokens(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (*map(ord, text), 0)]


TEXTS = st.lists(st.text(alphabet="abcdefgh", max_size=25), min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(TEXTS, st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_all_ranks_together_get_every_token_once(texts, size, per_device, accumulation, world):
    ranks = [steps(batches(texts, size, per_device, accumulation, world, rank)) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    one = steps(batches(texts, size, per_device * accumulation * world, 1, 1, 0))
    assert sorted(token for rank in ranks for part, _ in rank for token in part) == sorted(tokens(texts))
    assert [token for part, _ in one for token in part] == tokens(texts)
    for number, (whole, place) in enumerate(one):
        assert sorted(token for rank in ranks for token in rank[number][0]) == sorted(whole)
        assert all(rank[number][1] == place for rank in ranks)


@settings(deadline=None, max_examples=150)
@given(TEXTS, st.integers(1, 7), st.integers(1, 3), st.integers(1, 2), st.data())
def test_from_any_place_it_goes_on_where_it_was(texts, size, per_device, world, draw):
    rank = draw.draw(st.integers(0, world - 1))
    whole = steps(batches(texts, size, per_device, 1, world, rank))
    at = draw.draw(st.integers(0, len(whole) - 1))
    resumed = batches(texts, size, per_device, 1, world, rank)
    resumed.go_to(json.loads(json.dumps(whole[at][1])))
    assert steps(resumed) == whole[at + 1 :]
    assert resumed.exhausted
    resumed.next_epoch()
    assert resumed.epoch == 1 and not resumed.exhausted
    assert [part for part, _ in steps(resumed)] == [part for part, _ in whole]


def test_documents_before_the_place_are_read_but_not_tokenized():
    stream = batches(["abc", "defg", "hi"], 4, 1, 1, 1, 0)
    seen = []
    stream.texts.tokenizer = type(
        "Told", (Letters,), {"__call__": lambda self, text, **_: seen.append(text) or Letters()(text)}
    )()
    stream.go_to({"epoch": 0, "samples": 2, "document": 2, "offset": 1})
    assert [part for part, _ in steps(stream)] == [[ord("i"), 0]]
    assert seen == ["hi"]


def test_an_empty_stream_is_refused_instead_of_read_for_ever():
    stream = batches([], 4, 1, 1, 1, 0)
    assert steps(stream) == []
    with pytest.raises(Unsupported, match="the streamed training data has no rows"):
        stream.next_epoch()


def test_files_are_read_as_they_come(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": ')
    found = documents.stream([str(tmp_path / "a.jsonl")], documents.Columns(), {})
    with pytest.raises(Unsupported, match="a.jsonl:3: is not JSON: "):
        next(found)
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n{"words": "two"}\n')
    with pytest.raises(Unsupported, match="d.jsonl:2: the row has no 'text'"):
        read([str(tmp_path / "d.jsonl")], documents.Columns(), {})
    pyarrow.parquet.write_table(pyarrow.table({"text": [str(number) for number in range(9)]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("all of it")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 7}), tmp_path / "e.parquet", row_group_size=3)
    [*places] = documents.stream([str(tmp_path / "e.parquet")], documents.Columns(), {})
    assert [each.where.rpartition(":")[2] for each in places] == [*map(str, range(1, 8))]
    assert [each.key for each in places] == [f"e.parquet#{number}" for number in range(7)]
    names = [str(tmp_path / "b.parquet"), "input:train/c.txt"]
    assert read(names, documents.Columns(), {"train": str(tmp_path)}) == [
        *map(str, range(9)),
        "all of it",
    ]


def test_a_block_of_no_meaning_teaches_nothing():
    block = Texts(lambda epoch: iter(()), Letters(), 4)[0]
    assert block["input_ids"].shape == (4,) and (block["labels"] == IGNORED).all()
    assert np.array_equal(block["input_ids"], [0, 0, 0, 0])


def rows(folder: Path, count: int) -> list[str]:
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(count)))
    return [str(folder / "a.jsonl")]


def test_a_buffer_shuffles_a_stream_alike_everywhere_and_keeps_every_document(tmp_path: Path):
    names = rows(tmp_path, 200)
    order = [int(text) for text in read(names, documents.Columns(), {}, 20, seed=3)]
    assert sorted(order) == list(range(200)) and order != sorted(order)
    assert all(number <= place + 20 for place, number in enumerate(order)), "a document comes before it was read"
    assert order == [int(text) for text in read(names, documents.Columns(), {}, 20, seed=3)]
    assert order != [int(text) for text in read(names, documents.Columns(), {}, 20, seed=4)]
    for buffer in (0, 1):
        in_order = read(names, documents.Columns(), {}, buffer, seed=3)
        assert [int(text) for text in in_order] == list(range(200))


def test_a_shuffled_stream_resumes_at_its_place_and_each_epoch_has_another_order(tmp_path: Path):
    names = rows(tmp_path, 60)

    def made() -> StreamBatches:
        texts = Texts(lambda epoch: documents.stream(names, documents.Columns(), {}, 9, epoch), Letters(), 4)
        return StreamBatches(texts, 2, 1, 2, 1)

    whole = made()
    first = steps(whole)
    whole.next_epoch()
    second = steps(whole)
    assert [part for part, _ in first] != [part for part, _ in second]
    for at in (0, 5, len(second) - 1):
        resumed = made()
        resumed.go_to(json.loads(json.dumps(second[at][1])))
        assert steps(resumed) == second[at + 1 :]


RANKS = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from tests.entrypoints.trainer.data.test_stream import Letters, StreamBatches, Texts, documents, parts, shared_reading, steps

seen, reads = [], []
parts.RANGE, shared_reading.BATCH = 300, 10
shared_reading.AHEAD = int(os.environ.get("AHEAD", shared_reading.AHEAD))
together = int(os.environ.get("TOGETHER", 0))

def noting(name):
    made = getattr(parts, name)
    def note(file, *rest):
        reads.append([file.name, *rest][:2])
        if together:  # so many parts are begun before one of them is read
            begun = Path(sys.argv[1], "begun")
            begun.mkdir(exist_ok=True)
            (begun / "-".join(map(str, [file.name, *rest]))).touch()
            deadline = time.monotonic() + 60
            while len(list(begun.iterdir())) < together:
                assert time.monotonic() < deadline, f"{file.name} is read alone"
                time.sleep(0.01)
        return made(file, *rest)
    setattr(parts, name, note)

for name in ("read_range", "row_group", "numbered_rows"):
    noting(name)

class Counting(Letters):
    def __call__(self, text, **options):
        seen.append(text)
        return super().__call__(text)

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
reader = shared_reading.SharedReader(True)
texts = Texts(lambda epoch: documents.stream([sys.argv[1] + "/rows"], documents.Columns(), {}, 7, epoch, reader), Counting(), 5)
stream, error = StreamBatches(texts, 2, 1, ranks, rank), ""
try:
    learned = steps(stream)
except Exception as raised:
    learned, error = [], str(raised)
found = [None] * ranks
dist.all_gather_object(found, (seen, learned, error, reads))
if rank == 0:
    print("FOUND", json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
"""


def three_ranks(folder: Path, **settings: str) -> list:
    return json.loads(re.search(r"^FOUND (.*)$", ranks(RANKS, folder, 3, **settings)[0], re.MULTILINE)[1])


def test_ranks_tokenize_a_stream_together(tmp_path: Path):
    """Each document is tokenized by one rank; the global batches are those of one process."""
    file = tmp_path / "rows" / "a.jsonl"
    file.parent.mkdir()
    texts = ["abcdefgh"[: number % 8] + "x" * (number % 11) + str(number) for number in range(90)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = three_ranks(tmp_path)
    assert sorted(text for seen, *_ in found for text in seen) == sorted(texts)
    assert all(20 <= len(seen) <= 40 for seen, *_ in found)
    shuffled = Texts(lambda epoch: documents.stream([str(file)], documents.Columns(), {}, 7, epoch), Letters(), 5)
    one = steps(StreamBatches(shuffled, 6, 1, 1, 0))
    assert len(one) == len(found[0][1]) > 20
    for number, (whole, place) in enumerate(one):
        assert [token for _, learned, *_ in found for token in learned[number][0]] == whole
        assert all(learned[number][1] == place for _, learned, *_ in found)


@pytest.mark.parametrize("ahead", ["150", "9999"])
def test_each_row_is_read_by_one_rank_in_the_order_of_one_process(tmp_path: Path, ahead: str):
    """Byte ranges of jsonl, row groups of parquet and whole csv files; a run resumes on another number of ranks."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "rows"
    folder.mkdir()
    lines = [json.dumps({"text": f"{number} " + "x" * (number % 40)}) for number in range(60)]
    (folder / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines[:30]) + "\r\n" + "\n".join(lines[30:]))
    for name in ("b.csv", "d.csv"):
        (folder / name).write_text("text\n" + "".join(f'"{name}\n{number}"\n' for number in range(25)))
    table = pyarrow.table({"text": [f"p{number}" for number in range(50)]})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=20)
    (folder / "e.jsonl").write_text('{"text": "e"}\n')  # between others: a round that not all ranks have a part of
    (folder / "f.csv").write_text("text\n" + "f\n" * 25)
    found = three_ranks(tmp_path, AHEAD=ahead)
    assert not any(error for _, _, error, _ in found)
    reads = [read for *_, part in found for read in part]
    size = (folder / "a.jsonl").stat().st_size
    assert sorted(reads, key=str) == sorted(
        [["a.jsonl", begin] for begin in range(0, size, 300)]
        + [["c.parquet", number] for number in range(3)]
        + [["b.csv"], ["d.csv"], ["e.jsonl", 0], ["f.csv"]],
        key=str,
    ), "each part is read once"
    assert all(len([read for read in part if read[0] == "a.jsonl"]) > 1 for *_, part in found)
    counts = [len(part) for *_, part in found]
    assert max(counts) - min(counts) <= 1
    texts = Texts(lambda epoch: documents.stream([str(folder)], documents.Columns(), {}, 7, epoch), Letters(), 5)
    one = steps(StreamBatches(texts, 6, 1, 1, 0))
    assert len(one) == len(found[0][1]) > 20
    for number, (whole, place) in enumerate(one):
        assert [token for _, learned, *_ in found for token in learned[number][0]] == whole
        assert all(learned[number][1] == place for _, learned, *_ in found)
    resumed = StreamBatches(texts, 6, 1, 1, 0)
    resumed.go_to(found[0][1][9][1])
    assert steps(resumed) == one[10:]


def test_ranks_read_row_groups_and_files_at_the_same_time(tmp_path: Path):
    """A read waits until three have begun: one of the row group, and two of files beside it."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "rows"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["p"] * 40}), folder / "a.parquet", row_group_size=40)
    for name in ("b.csv", "c.csv"):
        (folder / name).write_text("text\n" + "x\n" * 40)
    found = three_ranks(tmp_path, TOGETHER="3")
    assert [error for _, _, error, _ in found] == ["", "", ""]
    assert [part for *_, part in found] == [[["a.parquet", 0]], [["b.csv"]], [["c.csv"]]]


def test_an_error_in_a_later_part_is_raised_behind_what_comes_before_it(tmp_path: Path):
    """The row of a hub dataset is counted from its beginning, also where it was read before its turn."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x"}] * 30))
    (tmp_path / "b.json").write_text(json.dumps([{"text": "x"}] * 1024) + "oh")
    made = (part for name in "ab" for part in parts.parts_of(tmp_path / f"{name}.json", name))
    shards = [*made, parts.Shard("hub", "hub", lambda: iter([(1, {"text": "x"}), (2, {"other": "x"})]), relative=True)]
    readings = [shared_reading._Reading(shard, documents.Columns()) for shard in shards]
    for reading in readings:
        reading.read_ahead()
    assert [len(reading.ready) for reading in readings] == [1, 1, 0]
    assert readings[0].batch(0)[-1] == (30, "x", None) and readings[0].batch(0) == []
    assert readings[1].batch(0)[-1] == (1024, "x", None)
    with pytest.raises(Unsupported, match="b.json:1: is not JSON: Extra data"):
        readings[1].batch(0)
    with pytest.raises(Unsupported, match="hub:72: the row has no 'text'; it has: other"):
        readings[2].batch(70)


def test_byte_ranges_have_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "ä" * (number % 7) + str(number)}, ensure_ascii=False) for number in range(40)]
    file.write_text("\ufeff" + "\n\n".join(lines[:20]) + "\r\n" + "\n".join(lines[20:]), newline="")
    for size in (1, 7, 16, 100, 10**6):
        monkeypatch.setattr(parts, "RANGE", size)
        found = list(documents.stream([str(file)], documents.Columns(), {}))
        assert [document.read() for document in found] == [json.loads(line)["text"] for line in lines]
        assert [document.where for document in found] == [
            f"{file}:{number}" for number in (*range(1, 40, 2), *range(40, 60))
        ]


def test_a_hub_dataset_is_read_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{number}"}}\n' for number in range(30)))
    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    rows = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows)
    monkeypatch.setattr(shared_reading, "BATCH", 8)
    found = list(documents.stream(["some/name"], documents.Columns(), {}))
    assert rows.num_shards == 2 and [document.read() for document in found] == [
        f"{name}{number}" for name in "ab" for number in range(30)
    ]
    assert found[31].where == "some/name:train:32"


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path):
    file = tmp_path / "rows" / "a.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)) + '{"text": \n')
    found = three_ranks(tmp_path)
    assert all("a.jsonl:21: is not JSON" in error for _, _, error, _ in found)
