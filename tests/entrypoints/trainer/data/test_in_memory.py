"""Data in memory: an iterable dataset on any world and from any place, samples that do not count."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.entrypoints.training import ENTRYPOINTS

from trainer.data.in_memory import Samples, SampleStream, make_task  # isort: skip
from trainer.labels import IGNORED  # isort: skip
from trainer.in_memory_arguments import TAKEN, parse_in_memory  # isort: skip

assert ENTRYPOINTS


class Numbers(IterableDataset):
    def __iter__(self):
        return ((torch.tensor([float(number)]), torch.tensor(number)) for number in range(11))


def stream(world: int, rank: int) -> SampleStream:
    task = make_task({"data": Numbers()}, own_loss=True)
    return task.stream(per_device=2, accumulation=2, world=world, rank=rank)


def steps(batches: SampleStream) -> list[list[int]]:
    """Return the samples that count, of each step that is left of this epoch."""
    found, source = [], iter(batches)
    for count in batches.windows():
        window = [next(source) for _ in range(count)]
        found.append([number for counts, (_, numbers) in window for number in numbers.tolist()[:counts]])
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
    assert half.place() == {"epoch": 1, "samples": 0} and steps(half) == all_steps


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
