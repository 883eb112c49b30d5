"""Samples: every token once, and the same global batches whatever the world is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.entrypoints.training import ENTRYPOINTS

from trainer.arguments import Arguments  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.data.samples import EMPTY, IGNORED, Blocks, GlobalBatches, accumulation, loader, padded  # isort: skip
from trainer.data import token_rows  # isort: skip
from trainer.data.language import packed  # isort: skip
from trainer.data.row_files import Document  # isort: skip
from trainer.data.token_rows import Rows, TokenRows  # isort: skip

assert ENTRYPOINTS


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id = 0

    def __call__(self, texts, **options):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


@given(st.lists(st.text(alphabet="abc", max_size=30), max_size=20), st.integers(1, 9), st.integers(1, 5))
def test_packing_keeps_every_token_once(texts: list[str], size: int, group: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_rows, "GROUP", group)
        stream = packed([Document("", text.__str__) for text in texts], Letters()).tokens
    assert bytes(stream.astype(np.uint8)).split(b"\0")[:-1] == [text.encode() for text in texts if text]
    blocks = Blocks(stream, size)
    assert len(blocks) == math.ceil(len(stream) / size)
    items = [blocks[index] for index in range(len(blocks))]
    kept = [item["labels"][item["labels"] != IGNORED] for item in items]
    assert torch.cat([*kept, torch.zeros(0, dtype=torch.int64)]).tolist() == stream.tolist()
    for item in items:
        assert item["input_ids"].shape == item["labels"].shape == (size,)
        real = item["labels"] != IGNORED
        assert (item["input_ids"][real] == item["labels"][real]).all()
        assert real.int().diff().le(0).all(), "what fills a block up stands on its right"


def test_a_limit_takes_the_first_blocks():
    blocks = Blocks(np.arange(10, dtype=np.int32), 4, limit=2)
    assert [blocks[index]["input_ids"].tolist() for index in range(len(blocks))] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert blocks.fingerprint() == Blocks(np.arange(8, dtype=np.int32), 4).fingerprint()
    assert len(Blocks(np.zeros(0, np.int32), 4)) == 0


def test_an_empty_sample_teaches_nothing():
    assert (Blocks(np.arange(10, dtype=np.int32), 4)[EMPTY]["labels"] == IGNORED).all()
    assert Rows(TokenRows.of([([1, 2], None, 1)]))[EMPTY]["labels"].item() == IGNORED


def test_rows_are_padded_to_the_longest():
    rows = Rows(TokenRows.of([([1, 2, 3], None, 1), ([4], None, 0)]))
    batch = padded([rows[0], rows[1]], pad=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]


def dealt(
    size: int, per_device: int, accumulation: int, world: int, drop_last: bool, samples: int = 0
) -> list[list[int]]:
    """Return the samples of each step, gathered from all ranks as the loop takes them; empty ones left out."""
    ranks = [GlobalBatches(size, per_device, accumulation, world, rank, 3, drop_last) for rank in range(world)]
    for rank in ranks:
        rank.samples = samples
    sources = [iter(rank) for rank in ranks]
    steps = []
    for count in ranks[0].windows():
        taken = [next(source) for source in sources for _ in range(count)]
        assert all(1 <= len(micro) <= per_device for micro in taken)
        steps.append(sorted(index for micro in taken for index in micro if index != EMPTY))
    assert all(next(source, None) is None for source in sources)
    return steps


@settings(max_examples=200)
@given(
    st.integers(1, 60), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 3, 4]), st.booleans(), st.data()
)
def test_global_batches(
    size: int, per_device: int, accumulation: int, world: int, drop_last: bool, data: st.DataObject
):
    total = per_device * accumulation * world
    steps = dealt(size, per_device, accumulation, world, drop_last)
    assert steps == dealt(size, 1, total, 1, drop_last), "one process takes the same samples in each step"
    assert [len(step) for step in steps[:-1]] == [total] * (len(steps) - 1)
    seen = sorted(index for step in steps for index in step)
    assert seen == (list(range(size)) if not drop_last else seen) and len(set(seen)) == len(seen) >= size - total + 1
    done = data.draw(st.integers(0, len(steps)))
    position = min(done * total, size)
    assert dealt(size, per_device, accumulation, world, drop_last, position) == steps[done:], "resumed in mid-epoch"
    batches = GlobalBatches(size, per_device, accumulation, world, 0, 3, drop_last)
    assert batches.steps_per_epoch == len(steps)
    for _ in range(done):
        batches.advance()
    assert batches.samples == position
    assert batches.exhausted == (done == len(steps))


def test_a_rank_without_samples_takes_a_whole_micro_batch_of_empty_ones():
    """BatchNorm refuses a single sample."""
    batches = GlobalBatches(36, per_device=8, accumulation=1, world=2, rank=1, seed=3, drop_last=False)
    *full, last = batches
    assert last == [EMPTY] * 8 and all(EMPTY not in micro and len(micro) == 8 for micro in full)


def test_epochs_have_orders_of_their_own_and_seeds_too():
    one, other = GlobalBatches(20, 4, 1, 1, 0, 3, False), GlobalBatches(20, 4, 1, 1, 0, 4, False)
    first = list(one)
    assert first == list(GlobalBatches(20, 4, 1, 1, 0, 3, False)) != list(other)
    one.advance()
    one.next_epoch()
    assert (one.epoch, one.samples) == (1, 0) and list(one) != first


def test_the_order_is_shuffled_over_the_whole():
    parts = list(GlobalBatches(1000, 100, 1, 1, 0, 3, False))
    assert sorted(index for part in parts for index in part) == list(range(1000))
    for part in parts:
        assert {index // 100 for index in part} == set(range(10)), "each batch has samples of every tenth"


def test_loaders_draw_no_global_random_numbers():
    state = torch.get_rng_state()
    batches = GlobalBatches(6, 2, 1, 1, 0, 3, False)
    assert len(list(loader(Rows(TokenRows.of([([1], None, 0)] * 6)), 0, False, batch_sampler=batches))) == 3
    assert (torch.get_rng_state() == state).all()


@pytest.mark.parametrize(
    "asked, ranks, steps",
    [
        ({}, 4, 3),
        ({"global_batch_size": 64}, 4, 8),
        ({"global_batch_tokens": 4096}, 2, 16),
        ({"global_batch_size": 8}, 4, 1),
    ],
)
def test_accumulation_follows_from_the_global_batch(asked: dict, ranks: int, steps: int):
    given = {"per_device_train_batch_size": 2, "block_size": 64, "gradient_accumulation_steps": 1 if asked else 3}
    assert accumulation(Arguments(**given, **asked), ranks) == steps


@pytest.mark.parametrize(
    "asked, sentence",
    [
        (
            {"global_batch_size": 12},
            "--global_batch_size 12 is not a multiple of the 8 samples that 4 ranks take at once; 16 is",
        ),
        ({"global_batch_size": 3}, "8 is the nearest"),
        (
            {"global_batch_tokens": 1000},
            "--global_batch_tokens 1,000 is not a multiple of the 512 tokens .* 1,024 is the nearest",
        ),
    ],
)
def test_a_global_batch_that_ranks_cannot_share_is_refused(asked: dict, sentence: str):
    with pytest.raises(Unsupported, match=sentence):
        accumulation(Arguments(per_device_train_batch_size=2, block_size=64, **asked), 4)
