"""Data of any size: what a rank reads equals what was given, is mapped and not copied, and is still the user's object."""

from __future__ import annotations

import copy
import hashlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from cloudtrain import DistributedTraining, Run
from cloudtrain.training import pickling, shipping
from tests.entrypoints.training import ENTRYPOINTS
from tests.test_training import LIMIT, Points, Wave, one_process

from trainer import in_memory_model  # isort: skip
from trainer.data.mapped import SampleList  # isort: skip

assert ENTRYPOINTS
MODEL = torch.nn.Linear(1, 1)
LARGE = 5000  # numbers: over 1,024 bytes in any type


def on_a_rank(folder: Path, data: Any) -> Any:
    """Return the data as a rank has it."""
    folder.mkdir(exist_ok=True)
    assert shipping.ship(folder, MODEL, {"data": data}, {}) == []
    return in_memory_model.unpickled(folder / "shipped", 42)["data"]


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in (folder / "shipped").rglob("*") if file.is_file()}


def numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(LARGE).remainder(251).to(dtype)


def things(tmp_path: Path) -> dict[str, Any]:
    import pandas
    import pyarrow
    from PIL import Image

    grid = torch.randn(100, 200)
    table = numpy.arange(40_000).reshape(200, 200)
    record = numpy.zeros(2000, [("at", "<i8"), ("name", "S5")])
    record["name"] = b"abc"
    on_disk = numpy.memmap(tmp_path / "tokens.bin", "uint16", "w+", shape=(LARGE,))
    on_disk[:] = numpy.arange(LARGE)
    read_only = numpy.arange(LARGE)
    read_only.flags.writeable = False
    types = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
    return {
        **{str(dtype): numbers(dtype) for dtype in types},
        "float8": numbers().to(torch.float8_e4m3fn),
        "small": torch.tensor([1.5, 2.5]),
        "small view": grid[3, :7],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "transposed": grid.T,
        "a column": torch.randn(2000, 500)[:, 3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3000, 2),
        "learns": torch.randn(LARGE, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(LARGE)),
        "sparse": torch.eye(3000).to_sparse(),
        "conjugated": numbers(torch.complex64).conj(),
        "array": table,
        "small array": table[0, :3],
        "fortran": numpy.asfortranarray(table),
        "backwards": table[::-1, ::-1],
        "array column": table[:, 5].repeat(100),
        "thin column": numpy.zeros((2000, 500))[:, 3],
        "broadcast": numpy.broadcast_to(numpy.arange(3), (3000, 3)),
        "record": record,
        "times": numpy.arange(LARGE).astype("datetime64[s]"),
        "objects": numpy.array(["a", 1, None] * 3000, dtype=object),
        "strings": numpy.array(["a", "bcd"] * 3000, dtype=numpy.dtypes.StringDType()),
        "read only": read_only,
        "on disk": on_disk,
        "frame": pandas.DataFrame({"x": range(LARGE), "text": ["row"] * LARGE}),
        "arrow": pyarrow.table({"x": range(LARGE), "text": ["row"] * LARGE}),
        "image": Image.new("RGB", (80, 80), "red"),
        "plain": {"a": (1, 2.5, "text", b"bytes", None), "b": [True, {"c"}]},
        "text": "text" * 3000,
    }


def described(value: Any) -> Any:
    """Return a value as something that can be compared, with its type."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            return kind, described(value.coalesce().values()), described(value.coalesce().indices())
        whole = value.resolve_conj().detach().contiguous()
        return kind, value.dtype, value.shape, value.requires_grad, whole.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, numpy.ndarray):
        return kind, value.dtype, value.shape, value.flags.writeable, value.tolist()
    if hasattr(value, "to_pydict"):
        return kind, value.to_pydict()
    if hasattr(value, "to_dict"):
        return kind, value.to_dict()
    return kind, value.tobytes() if kind.__module__.startswith("PIL") else value


class Holds(Dataset):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        return self.held[index]


def test_a_rank_reads_what_was_given_bit_by_bit_with_its_type(tmp_path: Path):
    given = things(tmp_path)
    again = on_a_rank(tmp_path / "job", Holds(given)).held
    assert {name: described(value) for name, value in again.items()} == {
        name: described(value) for name, value in given.items()
    }
    assert again["transposed"].stride() == given["transposed"].stride()
    assert again["expanded"].stride() == (0, 1) and again["backwards"].strides == given["backwards"].strides
    assert sizes(tmp_path / "job")["parts.pkl"] < 200_000, "only objects and texts are in the pickle"


def test_views_of_one_memory_are_written_once_and_copies_are_private(tmp_path: Path):
    base, window = torch.randn(100_000), numpy.arange(100_000)
    views = [base[at : at + 5000] for at in range(0, 90_000, 1000)]
    windows = [window[at : at + 5000] for at in range(0, 90_000, 1000)]
    again = on_a_rank(tmp_path, Holds([views, windows, base, base])).held
    assert sizes(tmp_path)["arrays"] < 4 * 100_000 + 8 * 100_000 + 1000
    assert all(map(torch.equal, again[0], views)) and all(map(numpy.array_equal, again[1], windows))
    assert again[2] is again[3]
    before = hashlib.sha256((tmp_path / "shipped" / "arrays").read_bytes()).digest()
    again[2].zero_()
    assert not again[0][3].any(), "as on the user's machine"
    assert hashlib.sha256((tmp_path / "shipped" / "arrays").read_bytes()).digest() == before
    fresh = in_memory_model.unpickled(tmp_path / "shipped", 42)["data"].held
    assert torch.equal(fresh[2], base), "another rank reads what was sent"


def test_of_a_large_tensor_only_the_part_that_is_used_is_written(tmp_path: Path):
    large = torch.randn(1_000_000)
    again = on_a_rank(tmp_path, TensorDataset(large[500:2500], large[2500:4500]))
    assert torch.equal(again.tensors[1], large[2500:4500])
    assert sizes(tmp_path)["arrays"] < 17_000
    column = on_a_rank(tmp_path / "column", Holds(numpy.ones((2000, 500))[:, 3])).held
    assert column.sum() == 2000 and sizes(tmp_path / "column")["arrays"] < 17_000


class Augmented(Dataset):
    def __init__(self) -> None:
        self.images = torch.ones(50, 1000)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index] * torch.rand(1)


def test_what_a_dataset_draws_at_random_is_drawn_again_on_the_rank(tmp_path: Path):
    again = on_a_rank(tmp_path, Augmented())
    assert len({float(again[7][0]) for _ in range(5)}) == 5


def rows() -> list[Any]:
    shared = torch.randn(2000)
    return [
        (numbers()[:3000] + at, {"shared": shared, "at": at, "text": str(at), "array": numpy.full(4, at)})
        for at in range(60)
    ]


@pytest.mark.parametrize("wrap", [list, tuple, lambda given: ConcatDataset([Subset(given, range(60)), given])])
def test_each_sample_of_a_large_list_is_read_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Any
):
    given = rows()
    monkeypatch.setattr(pickling, "FEW", 50)
    data = wrap(given)
    again = on_a_rank(tmp_path, data)
    assert len(again) == len(data)
    for at in (0, 1, 59, 17, -1):
        (expected, fields), (tensor, read) = data[at], again[at]
        assert torch.equal(tensor, expected) and type(again[at]) is tuple
        assert described(read.pop("array")) == described(fields["array"])
        assert torch.equal(read.pop("shared"), fields["shared"])
        assert read == {"at": fields["at"], "text": fields["text"]}
    assert sizes(tmp_path)["arrays"] < 60 * 12_100 + 8100, "a tensor of all samples is there once"
    assert sizes(tmp_path)["parts.pkl"] < 10_000
    if type(data) in (list, tuple):
        assert type(again) is SampleList
        assert [fields["at"] for _, fields in again[50:90:4]] == [50, 54, 58] and len(list(again)) == 60
        with pytest.raises(IndexError):
            again[60]
        assert torch.equal(pickle.loads(pickle.dumps(again))[3][0], given[3][0]), "for workers that are not forked"


def test_a_small_list_stays_one(tmp_path: Path):
    assert type(on_a_rank(tmp_path, rows())) is list


def test_objects_that_each_rank_holds_get_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shipping, "HELD_BYTES", 24_000)
    [note] = shipping.ship(tmp_path, MODEL, {"data": Holds([f"text {at}" for at in range(9000)])}, {})
    assert note.startswith("each rank holds 0.0 GB of objects in memory, such as texts")


def test_the_same_data_in_another_place_of_memory_gives_the_same_files(tmp_path: Path):
    digests = set()
    for attempt in range(3):
        spare = [torch.empty(1000 * (attempt + 1)) for _ in range(9)]
        torch.manual_seed(0)
        base = torch.randn(30_000)
        arrays = [numpy.arange(LARGE + at) for at in range(9)]
        folder = tmp_path / str(attempt)
        on_a_rank(folder, [base[1:6000], base[5000:20_000], *arrays])
        files = sorted(path for path in (folder / "shipped").rglob("*") if path.is_file())
        digests.add(tuple((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files))
        assert spare
    assert len(digests) == 1


def test_a_table_on_this_machine_and_a_transform_travel_with_what_holds_them(tmp_path: Path):
    import datasets

    datasets.Dataset.from_dict({"x": [[at, at + 1] for at in range(3000)]}).save_to_disk(tmp_path / "rows")
    on_disk = datasets.load_from_disk(str(tmp_path / "rows"))
    transformed = on_disk.with_transform(lambda batch: {"x": [torch.tensor(x) * 2 for x in batch["x"]]})
    again = on_a_rank(tmp_path / "a", ConcatDataset([Subset(on_disk, [5, 7]), transformed.select(range(10, 20))]))
    changed = on_a_rank(tmp_path / "b", transformed)
    (tmp_path / "rows").rename(tmp_path / "gone")
    assert again[1] == {"x": [7, 8]} and again[3]["x"].tolist() == [22, 24]
    assert len(changed) == 3000 and changed[4]["x"].tolist() == [8, 10]


MEASURED = """
import resource, sys
from pathlib import Path
import numpy, torch
from torch.utils.data import TensorDataset
from cloudtrain.training import pickling, shipping
from trainer import in_memory_model

SIZE = 1 << 26

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

def bounded(more):
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + more, resource.RLIM_INFINITY))

class Images:
    def __init__(self, images): self.images = images
    def __len__(self): return len(self.images)
    def __getitem__(self, at): return self.images[at], at

folder, what = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.ones(1 << 20).sum()
if what == "send":
    data = {"tensors": TensorDataset(torch.ones(SIZE // 4000, 1000)), "images": Images(numpy.ones((SIZE // 4000, 1000), "f4")),
            "eval_data": [(row,) for row in torch.ones(24_000, 200)],
            "column": Images(numpy.ones((3 << 12, 1 << 12, 3), "u1")[..., 1])}
    bounded(30 << 20)
    shipping.ship(folder, torch.nn.Linear(1, 1), data, {})
else:
    bounded(4 * SIZE + (30 << 20))  # the mapping is private, and counts
    before = status("RssAnon")
    data = in_memory_model.unpickled(folder / "shipped", 1)
    data.pop("model")
    total = sum(float(torch.as_tensor(each[at][0]).sum()) for each in data.values() for at in range(len(each)))
    print(int(total), (status("RssAnon") - before) >> 20)
"""


def test_neither_the_client_nor_a_rank_holds_a_copy(tmp_path: Path):
    """64 MiB each of tensors and an array, a list of 24,000, a column; a rank reads all samples, and may not allocate more."""
    paths = {"PYTHONPATH": f"{ENTRYPOINTS}:{Path(__file__).parents[2]}", "PATH": "", "OMP_NUM_THREADS": "1"}
    for what in ("send", "read"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, str(tmp_path), what],
            env=paths,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    total, grown = map(int, done.stdout.split())
    assert total == 2 * 16_777_000 + 24_000 * 200 + (3 << 24) and grown < 30


@pytest.mark.train
def test_ranks_learn_from_mapped_data_and_single_samples_what_one_process_learns(census: Path):
    """A list whose samples are read one by one and views of one tensor; a worker process reads them too."""
    points = Points(361)
    samples = [points[at] for at in range(361)]
    inputs, target = (torch.stack(each) for each in zip(*samples[:300], strict=True))
    data = ConcatDataset([TensorDataset(inputs, target), Subset(samples, range(300, 361))])
    model = Wave()
    alone = copy.deepcopy(model)
    expected = one_process(alone, points, global_batch=64, epochs=2)
    result = DistributedTraining(target="local").train_distributed(
        model, data, processes_per_node=2, epochs=2, batch_size=32, learning_rate=1e-2, logging_steps=1,
        dataloader_num_workers=1, **LIMIT,
    )  # fmt: skip
    run = Run.find(result["run_id"])
    assert [row.value for row in run.metrics("loss")] == pytest.approx(expected, abs=1e-5)
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-5), name
    shipped = run.store.home / "runs" / run.run_id / "a1" / "node-0" / "source" / "shipped"
    assert sorted(each.name for each in shipped.iterdir()) == ["arrays", "lists", "parts.pkl"]
