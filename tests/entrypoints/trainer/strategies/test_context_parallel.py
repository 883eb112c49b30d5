"""Sequences in parts: who has which, and that a model says the same of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.entrypoints.training import ENTRYPOINTS, Trainer

from trainer.strategies import context_parallel  # isort: skip
from trainer import model as models  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.labels import IGNORED  # isort: skip

assert ENTRYPOINTS
CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_token_is_one_rank_s_and_all_have_the_same_work(size: int):
    length = 4 * 2 * size
    parts = [context_parallel.ContextParallel(size, place) for place in range(size)]
    assert sorted(token for each in parts for token in each.positions(length, CPU).tolist()) == list(range(length))
    looked_at = [sum((number + 1) * 4 for number in each.chunks) for each in parts]
    assert len(set(looked_at)) == 1 and looked_at[0] == 4 * (2 * size + 1)


def test_parts_are_put_in_order_again():
    whole = torch.arange(2 * 3 * 24 * 2).view(2, 3, 24, 2)  # (B, H, T, D)
    parts = [whole[:, :, context_parallel.ContextParallel(3, place).positions(24, CPU)] for place in range(3)]
    assert (context_parallel.in_order(torch.stack(parts)) == whole).all()


def test_what_a_token_sees():
    every = torch.ones(6, 6, dtype=torch.bool).tril()
    assert (context_parallel.visible(0, 6, None, CPU)[0, 0] == every).all()
    assert (context_parallel.visible(4, 6, None, CPU)[0, 0] == every[4:]).all()
    assert context_parallel.visible(4, 6, 2, CPU)[0, 0].tolist() == [
        [False] * 3 + [True] * 2 + [False],
        [False] * 4 + [True] * 2,
    ]


@pytest.mark.parametrize("length", [8, 9, 11, 15])
def test_labels_are_shifted_before_sequences_are_cut(length: int):
    """The label of a part's last token is the first token of a part that another rank has."""
    ids = torch.arange(100, 100 + 2 * length).view(2, length)
    labels = ids.clone()
    labels[:, 3] = IGNORED
    found = {}
    for place in range(2):
        part = context_parallel.ContextParallel(2, place).part({"input_ids": ids, "labels": labels})
        goals = models.targets(part["labels"])
        assert goals.shape == part["input_ids"].shape == part["position_ids"].shape
        assert goals.shape[1] == -(-length // 4) * 2
        for token, goal, position in zip(part["input_ids"][0], goals[0], part["position_ids"][0], strict=True):
            found[int(token)] = (int(goal), int(position))
    found.pop(0, None)  # padding
    expected = {100 + at: (101 + at, at) for at in range(length)}
    expected[102] = (IGNORED, 2)
    expected[99 + length] = (IGNORED, length - 1)
    assert found == expected


def test_what_is_not_cut_is_refused():
    """Documents in one sequence that must not see each other, say."""
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(Unsupported, match="cp_size 2: the batches have position_ids, which cannot be split"):
        context_parallel.ContextParallel(2, 0).part({"input_ids": ids, "labels": ids, "position_ids": ids})
    with pytest.raises(Unsupported, match="the model creates its own attention mask"):
        context_parallel.ContextParallel(2, 0).attend(torch.nn.Module(), ids, ids, ids, ids)


def test_positions_that_depend_on_the_length_are_found_in_any_layer():
    assert context_parallel.rope(None) == context_parallel.rope({"rope_type": "yarn", "factor": 2.0}) == ""
    assert context_parallel.rope({"rope_type": "longrope"}) == "longrope"
    assert context_parallel.rope(
        {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    )


@pytest.mark.train
@pytest.mark.timeout(600)
def test_families_say_the_same_of_parts_as_of_whole_sequences(tmp_path: Path):
    """Losses and gradients, summed over two ranks; grouped heads, windows, experts, recomputed layers, padding."""
    script = Path(__file__).with_name("sharing.py")
    with Trainer(tmp_path / "run", [], 2, script=script) as ranks:
        assert ranks.codes() == [0, 0], ranks.everything()
    for rank in (0, 1):
        [line] = [line for line in ranks.output(rank).splitlines() if line.startswith("FOUND ")]
        said = json.loads(line.removeprefix("FOUND "))
        for name, found in said["cases"].items():
            assert found["loss"] < 1e-5 and found["gradients"] < 1e-4, (name, found)
            assert found["alone"] > 1e-2, f"{name}: one rank alone cannot have the gradients of all"
            assert found["own again"], name
            assert found["seen"]["tokens"] * 2 == found["seen"]["keys"] >= 24, (name, found)
        assert said["cases"]["gpt2, recomputed"]["recomputed"]
        assert said["kept"]["parts"] < 0.6 * said["kept"]["whole"], said["kept"]
        assert set(said["cases"]) >= context_parallel.FAMILIES - {"mistral"}  # with a window, below another name
        for name in ("lfm2", "bert"):
            assert f"cp_size 2: {name} is not supported; supported models: gemma, " in said["unknown"][name]
        assert "positions of the type dynamic depend on the sequence length" in said["unknown"]["llama, dynamic"]
        assert "positions of the type longrope depend on the sequence length" in said["unknown"]["phi3, longrope"]
        for name, sentence in said["refusals"].items():
            assert "gives other results for a split sequence than for a whole one" in sentence, (name, sentence)
