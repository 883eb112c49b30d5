"""Data in memory: an iterable dataset on any world and from any place, samples that do not count."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.entrypoints.training import ENTRYPOINTS

from trainer.data import shards  # isort: skip
from trainer.data.in_memory import make_task  # isort: skip
from trainer.data.sample_stream import Samples, SampleStream  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.labels import IGNORED  # isort: skip
from trainer.in_memory_arguments import TAKEN, parse_in_memory  # isort: skip

assert ENTRYPOINTS


class Numbers(IterableDataset):
    def __iter__(self):
        return ((torch.tensor([float(number)]), torch.tensor(number)) for number in range(11))


class Parts(Numbers):
    """The numbers, of which a worker yields its part, as torch's documentation has it."""

    size = 24

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        mine = range(self.size) if info is None else range(self.size)[info.id :: info.num_workers]
        for number in mine:
            self.read = [*getattr(self, "read", []), number]
            yield torch.tensor([float(number)]), torch.tensor(number)


def of_hub(shards: int) -> IterableDataset:
    from datasets import Dataset as Table

    rows = [{"x": [float(number)], "labels": number} for number in range(24)]
    return Table.from_list(rows).with_format("torch").to_iterable_dataset(num_shards=shards)


def stream(world: int, rank: int, data: IterableDataset | None = None) -> SampleStream:
    task = make_task({"data": data or Numbers()}, own_loss=True)
    return task.stream(per_device=2, accumulation=2, world=world, rank=rank)


def steps(batches: SampleStream) -> list[list[int]]:
    """Return the samples that count, of each step that is left of this epoch."""
    found, source = [], iter(batches)
    for count in batches.windows():
        window = [next(source) for _ in range(count)]
        own = [(counts, batch["labels"] if isinstance(batch, dict) else batch[1]) for counts, batch in window]
        found.append([number for counts, numbers in own for number in numbers.tolist()[:counts]])
        batches.advance()
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_is_taken_once_in_the_same_global_batches(world: int):
    ranks = [steps(stream(world, rank)) for rank in range(world)]
    size = 4 * world
    together = [sorted(sum(step, [])) for step in zip(*ranks, strict=True)]
    assert together == [list(range(at, min(at + size, 11))) for at in range(0, 11, size)]


def test_a_resumed_stream_continues_at_its_place_and_begins_again():
    whole, half = stream(1, 0), stream(1, 0)
    all_steps = steps(whole)
    half.go_to({"epoch": 0, "samples": 8})
    assert steps(half) == all_steps[2:] == [[8, 9, 10]] and half.exhausted
    half.next_epoch()
    assert half.place() == {"epoch": 1, "samples": 0, "readers": 1} and steps(half) == all_steps


@pytest.mark.parametrize("kind", ["workers", "shards"])
def test_each_rank_reads_its_own_shards_where_the_dataset_offers_it(kind: str):
    datas = [Parts() if kind == "workers" else of_hub(4) for _ in range(2)]
    streams = [stream(2, rank, data) for rank, data in enumerate(datas)]
    assert {each.described for each in streams} == {", of which each rank reads its own shards"}
    taken = [steps(each) for each in streams]
    assert sorted(sum(taken[0] + taken[1], [])) == list(range(24))
    if kind == "workers":
        assert set(datas[1].read) - {0} == set(range(1, 24, 2)), "but for the first sample, by which it is found out"


@pytest.mark.parametrize("data", [Parts, lambda: of_hub(4)])
def test_a_resumed_stream_of_shards_has_the_same_global_batches_on_another_world(data):
    """Begun by two ranks with a batch of 8; one rank, and four, then take what the two would have taken."""
    both = [stream(2, rank, data()) for rank in range(2)]
    rest = [sorted(first + second) for first, second in zip(*map(steps, both), strict=True)][1:]
    place = {"epoch": 0, "samples": 8, "readers": 2}
    alone = stream(1, 0, data())
    alone.go_to(place)
    assert alone.place() == place
    halves = steps(alone)
    assert [sorted(sum(halves[at : at + 2], [])) for at in range(0, len(halves), 2)] == rest
    four = [stream(4, rank, data()) for rank in range(4)]
    for each in four:
        each.go_to(place)
    assert sorted(sum((sum(steps(each), []) for each in four), [])) == sorted(sum(rest, []))
    assert "it has 2 readers, no multiple of 4 ranks" in four[0].described


def test_a_stream_that_each_rank_reads_whole_says_why():
    assert stream(1, 0).described == ""
    assert stream(2, 0).described == (
        ", which each rank reads whole: its __iter__ does not ask get_worker_info() for a part, and it has no num_shards"
    )
    assert stream(2, 1, of_hub(3)).described == ", which each rank reads whole: its 3 shards are no multiple of 2"


def test_a_rank_whose_shards_have_ended_takes_part_with_samples_that_do_not_count():
    class Uneven(Parts):
        size = 5

    ranks = [stream(2, rank, Uneven()) for rank in range(2)]
    assert [next(iter(each.windows())) for each in ranks] == [2, 1]
    first, second = (next(iter(each))[0] for each in ranks)
    assert (first, second) == (2, 2)
    assert [counts for counts, _ in [item for item, _ in zip(iter(ranks[1]), range(2), strict=False)]] == [2, 0]


def test_a_sample_of_a_language_model_that_does_not_count_has_no_label():
    task = make_task({"data": [{"input_ids": [1, 2], "labels": [1, 2]}]}, own_loss=False)
    batch = task.collate([task.train[0], task.train[-1]])
    assert batch["labels"].tolist() == [[1, 2], [IGNORED, IGNORED]] and int(task.count(None, batch)) == 1
    assert Samples([5])[0] == (True, 5) and Samples([5])[-1] == (False, 5)


def test_accuracy_is_counted_of_classes_only():
    classes = make_task({"data": [1]}, own_loss=True)
    batch = (torch.tensor(2), [torch.eye(2), torch.tensor([0, 0])])
    rows = classes.scores(torch.nn.Identity(), batch)
    assert classes.summary(rows.sum(0).tolist())["eval_accuracy"] == 0.5
    numbers = (torch.tensor(2), [torch.eye(2), torch.eye(2)])
    assert classes.summary(classes.scores(torch.nn.Identity(), numbers).sum(0).tolist()) == {"eval_loss": 0.0}


def test_the_arguments_that_are_taken_exist():
    arguments = parse_in_memory([])
    assert [name for name in TAKEN if not hasattr(arguments, name)] == []
    assert (arguments.lr_scheduler_type, arguments.max_grad_norm, arguments.optim) == ("constant", 0.0, "adamw_torch")


def test_a_torch_that_keeps_its_worker_elsewhere_is_named(monkeypatch):
    """shards.py sets a private name of torch: this fails with the first version that has another one."""
    assert shards.offer(Parts(), 2) == (shards.WORKERS, "")
    info = shards.ReaderInfo(1, 2, Parts())
    with shards.seen(info):
        assert torch.utils.data.get_worker_info() is info
    assert torch.utils.data.get_worker_info() is None
    monkeypatch.setattr(shards, "get_worker_info", lambda: None)  # what a torch with another name would return
    version = rf"torch {re.escape(torch.__version__)} does not let get_worker_info\(\) return"
    how, why = shards.offer(Parts(), 2)
    assert how == "" and re.match(version, why)
    with pytest.raises(Unsupported, match=version):
        next(shards.reader(Parts(), shards.WORKERS, 1, 2))
