"""The order of samples: one for any number of ranks, every sample once an epoch, continued after the last one trained on."""

from __future__ import annotations

import cloudtrain_runtime as runtime
import pytest
from hypothesis import given
from hypothesis import strategies as st

Sampler = runtime.ResumableSampler


def by_step(size: int, step_size: int, world: int, **facts) -> list[list[int]]:
    """Return the samples of each step of the next epoch, those of all ranks in their order."""
    state = facts.pop("state", None)
    ranks = [Sampler(size, step_size, rank=rank, world_size=world, **facts) for rank in range(world)]
    for rank in ranks:
        if state:
            rank.load_state_dict(state)
    drawn, share = [list(rank) for rank in ranks], step_size // world
    return [sum((one[at : at + share] for one in drawn), []) for at in range(0, len(drawn[0]), share)]


@given(
    size=st.integers(1, 40),
    share=st.integers(1, 4),
    steps=st.integers(0, 30),
    seed=st.integers(0, 3),
    cut=st.booleans(),
)
def test_the_order_is_the_same_for_any_number_of_ranks_and_resumes(size, share, steps, seed, cut):
    step_size = 4 * share
    facts = {"seed": seed, "drop_last": cut}
    if cut and size < step_size:
        with pytest.raises(ValueError, match="make no step"):
            Sampler(size, step_size, **facts)
        return
    whole = Sampler(size, step_size, **facts)
    whole.trained(steps)
    epoch = by_step(
        size, step_size, 1, state={**whole.state_dict(), "steps": whole.epoch * whole.steps_per_epoch}, **facts
    )
    flat = sum(epoch, [])
    assert len(epoch) == whole.steps_per_epoch and len(flat) == len(whole)
    assert (
        len(set(flat)) == (len(flat) if cut else size)
        and flat[size:] == (flat[:size] * step_size)[: len(flat) - len(flat[:size])]
    )
    for world in (1, 2, 4):
        left = by_step(size, step_size, world, state=whole.state_dict(), **facts)
        assert left == epoch[steps % whole.steps_per_epoch :]


def test_each_epoch_and_each_seed_has_its_own_order():
    first, second = Sampler(50, 10), Sampler(50, 10, seed=1)
    orders = [list(first), list(second)]
    first.trained(5)
    assert first.epoch == 1
    orders.append(list(first))
    assert len({tuple(order) for order in orders}) == 3 and all(sorted(order) == list(range(50)) for order in orders)
    assert list(Sampler(["a", "b", "c"], 2, shuffle=False)) == [0, 1, 2, 0]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="multiple of the number of ranks, 3"):
        Sampler(50, 10, world_size=3)
    state = Sampler(50, 10).state_dict()
    for other in ({"data": 51}, {"step_size": 20}, {"seed": 1}, {"shuffle": False}, {"drop_last": True}):
        with pytest.raises(ValueError, match=r"they must be the same"):
            Sampler(**{"data": 50, "step_size": 10, **other}).load_state_dict(state)


def noise(rows: list[int]):
    """What a collate function may do with random numbers: masks of Python, NumPy and torch."""
    import random

    import numpy
    import torch

    return [(row, random.random(), float(numpy.random.random()), float(torch.rand(()))) for row in rows]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_drawn_for_a_batch_depends_on_its_samples_and_the_epoch_alone(workers: int):
    import random

    import numpy
    import torch
    from cloudtrain_sampler import SeededBatches
    from torch.utils.data import DataLoader

    def epoch(number: int, seed: int, order: list[int]) -> list:
        loader = DataLoader(range(8), batch_size=2, sampler=order, collate_fn=noise, num_workers=workers)
        batches = SeededBatches.of(loader, seed)
        batches.epoch.fill_(number)
        return list(loader)

    whole = epoch(0, 3, list(range(8)))
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    rest = epoch(0, 3, [4, 5, 6, 7])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before
    after = torch.rand(()).item()
    torch.manual_seed(1)
    iter(DataLoader(range(1)))  # each loader draws a seed for its workers
    assert after == torch.rand(()).item()
    assert rest == whole[2:] and [row[0] for batch in whole for row in batch] == list(range(8))
    assert whole != epoch(1, 3, list(range(8))) != epoch(1, 4, list(range(8)))
    assert len({drawn for batch in whole for row in batch for drawn in row[1:]}) == 24


def test_a_stream_keeps_its_own_random_numbers():
    from cloudtrain_sampler import SeededBatches
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    assert SeededBatches.of(DataLoader(Stream(), batch_size=2), 0) is None
