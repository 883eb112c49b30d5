"""Pieces of a model: put together again they are the model."""

from __future__ import annotations

import pytest
import torch

from tests.entrypoints.training import ENTRYPOINTS

from trainer.strategies import mesh  # isort: skip
from trainer.strategies import stages  # isort: skip
from trainer.errors import Unsupported  # isort: skip

assert ENTRYPOINTS


def model(kind: str, layers: int = 4):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2}
    extra = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind != "gpt2":
        extra |= {"intermediate_size": 32, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, **extra, max_position_embeddings=32)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.train
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("count", [2, 4])
def test_stages_one_after_the_other_are_the_whole_model(kind: str, count: int):
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    whole = model(kind)
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    found: list[str] = []
    hidden = ids
    with torch.no_grad():
        for index in range(count):
            mine = model(kind)
            [stage] = stages.cut(mine, [index], count)
            assert (stage.first, stage.last) == (index == 0, index == count - 1)
            hidden = stage(hidden)
            found += [name for name, _ in mine.named_parameters(remove_duplicate=False)]
        assert torch.allclose(hidden, whole(input_ids=ids).logits, atol=1e-6)
    assert sorted(found) == sorted(names), "every parameter lies in one stage, under its own name"


@pytest.mark.train
def test_stages_of_one_rank_share_the_modules_that_it_keeps():
    whole = model("llama")
    first, third = stages.cut(whole, [0, 2], 4)
    assert first.model.base_model.layers[0] is whole.base_model.layers[0]
    assert third.model.base_model.layers[2] is whole.base_model.layers[2]
    kept = {name.split(".")[2] for name, _ in whole.named_parameters() if ".layers." in name}
    assert kept == {"0", "2"}


@pytest.mark.train
def test_what_cannot_be_cut():
    with pytest.raises(Unsupported, match="4 layers cannot be split equally over 3"):
        stages.check_cut(model("llama"), 3)
    with pytest.raises(Unsupported, match="no pipeline plan for bert; there are plans for llama"):
        stages.check_cut(model("bert"), 2)


@pytest.mark.train
@pytest.mark.parametrize(
    "parallelism, batch, expected",
    [
        ({}, 8, 4),  # twice the stages
        ({}, 2, 2),
        ({}, 6, 6),
        ({"microbatches": 2}, 8, 2),
        ({"pp_schedule": "gpipe", "microbatches": 1}, 8, 1),
        ({"virtual_stages": 2}, 12, 4),
    ],
)
def test_a_batch_is_cut_as_the_schedule_can_take_it(parallelism: dict, batch: int, expected: int):
    from trainer.strategies import pipeline

    assert pipeline.microbatches(mesh.choose_plan({"pp_size": 2, **parallelism}, 2), batch) == expected


@pytest.mark.train
@pytest.mark.parametrize(
    "parallelism, batch, sentence",
    [
        ({}, 1, "--per_device_train_batch_size 1 does not suit a pipeline of 2 .1f1b.: it needs a larger batch"),
        ({"microbatches": 3}, 8, "does not suit microbatches 3 .1f1b.: use 2, 4, 8"),
        ({"microbatches": 1}, 8, "microbatches 1 .1f1b.: use 2, 4, 8"),
        ({"virtual_stages": 2, "microbatches": 3}, 12, "microbatches 3 .interleaved.: use 2, 4, 6, 12"),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused(parallelism: dict, batch: int, sentence: str):
    from trainer.strategies import pipeline

    with pytest.raises(Unsupported, match=sentence):
        pipeline.microbatches(mesh.choose_plan({"pp_size": 2, **parallelism}, 2), batch)
