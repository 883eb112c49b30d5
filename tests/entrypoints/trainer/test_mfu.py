"""MFU: the table of GPUs by the names that drivers give them, the formula against torch's own count, and who tells it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cloudtrain.forecast.models import Shape, from_config
from cloudtrain.forecast.speed import flops_per_token
from cloudtrain.testing.clock import VirtualClock
from tests.entrypoints.training import ENTRYPOINTS, TINY, Trainer, texts

from trainer import mfu, peaks  # isort: skip
from trainer import model as models  # isort: skip
from trainer.metrics import Meter  # isort: skip

assert ENTRYPOINTS
NAMES = {  # as torch.cuda.get_device_name says them
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA B200": 2250,
    "NVIDIA L4": 121,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA A10": 125,
    "NVIDIA A10G": 70,
    "NVIDIA A40": 149.7,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
}
STRANGE = [  # relatives and slices of those above: a number of theirs would be made up
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H800",
    "NVIDIA H20",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA RTX 6000 Ada Generation",
    "Quadro T4000",
    "AMD Instinct MI300X",
    "",
]


def test_known_gpus_by_their_drivers_names():
    assert {name: peaks.peak(name, "bf16") for name in NAMES} == {name: tera * 1e12 for name, tera in NAMES.items()}
    assert [name for name in STRANGE if peaks.peak(name, "bf16") or peaks.peak(name, "fp32")] == []
    old = {"Tesla T4": (65, 8.1), "Tesla V100-SXM2-32GB": (125, 15.7), "Tesla V100-PCIE-16GB": (112, 14)}
    for name, (half, single) in old.items():
        assert peaks.peak(name, "bf16") is None, "it has no bfloat16"
        assert (peaks.peak(name, "fp16"), peaks.peak(name, "tf32")) == (half * 1e12, single * 1e12)
    assert (
        peaks.peak("NVIDIA A100-SXM4-80GB", "tf32") == 156e12 and peaks.peak("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    )


def test_every_row_is_one_gpu_with_an_address():
    rows = list(chain.from_iterable(peaks.SOURCES.values()))
    assert len({row.name for row in rows}) == len(rows) and all(url.startswith("https://") for url in peaks.SOURCES)
    for row in rows:  # float32 is never the fastest
        assert row.fp32 <= (row.tf32 or row.fp32) <= row.fp16 and row.bf16 in (None, row.fp16)


def small(kind: str, **more) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    inner = {"gpt2": "n_inner", "opt": "ffn_dim", "distilbert": "hidden_dim"}.get(kind, "intermediate_size")
    sizes |= {inner: 160, "max_position_embeddings": 128} | ({"word_embed_proj_dim": 64} if kind == "opt" else {})
    sizes |= {"num_key_value_heads": 2} if kind in ("llama", "mistral", "qwen2", "qwen3", "phi3") else {}
    reads = kind in ("bert", "roberta", "distilbert")
    auto = AutoModelForSequenceClassification if reads else AutoModelForCausalLM
    config = AutoConfig.for_model(kind, **(sizes | tokens | more))
    return auto.from_config(config, attn_implementation="eager")  # every product of which is counted


def told_by_counted(model: torch.nn.Module) -> float:
    """Return what the formula says of a step over what torch counts."""
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(2, 512, (2, 96))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.float().sum().backward()
    work = mfu.work(model, 96)
    return (work.token * ids.numel() + work.pair * models.pairs({"input_ids": ids})) / counter.get_total_flops()


@pytest.mark.parametrize("kind", sorted(mfu.FAMILIES))
def test_the_formula_against_a_count_of_operations(kind: str):
    """To the last operation where a language model is trained; a classifier's head sees one token a sample."""
    found = told_by_counted(small(kind))
    assert found == 1 if kind not in ("bert", "roberta", "distilbert") else 1 <= found < 1.03


@pytest.mark.parametrize("kind", ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2"))
def test_the_forecast_of_time_counts_the_same(kind: str):
    model = small(kind)
    work, shape = mfu.work(model, 96), from_config(model.config.to_dict())
    assert work and isinstance(shape, Shape) and flops_per_token(shape, 96) == work.token + 96 * work.pair


def test_other_shapes_against_a_count():
    """Fewer key and value heads, both embeddings one matrix or two, a head's width that is not its share."""
    assert told_by_counted(small("llama", num_key_value_heads=1, tie_word_embeddings=True)) == 1
    assert told_by_counted(small("qwen3", head_dim=32, num_key_value_heads=2, tie_word_embeddings=False)) == 1


def test_what_is_frozen_costs_two_thirds():
    """The formula goes through all layers backward; the lowest matrices have nobody to pass anything on to."""
    from peft import LoraConfig, get_peft_model

    whole = small("llama")
    before = mfu.work(whole, 96).token
    adapted = get_peft_model(whole, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    learned = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert mfu.work(adapted, 96).token == before * 4 / 6 + 6 * learned
    assert 1 <= told_by_counted(adapted) < 1.05


def test_nothing_is_told_of_what_is_not_known():
    mixtral = SimpleNamespace(config=SimpleNamespace(model_type="mixtral"))
    assert mfu.work(mixtral, 96) is None
    assert mfu.work(small("mistral", sliding_window=64), 96) is None and mfu.work(small("mistral"), 96) is not None
    assert mfu.use(mfu.Work(1, 1), torch.device("cpu"), "bf16") is None


def test_weights_in_bfloat16_are_multiplied_in_bfloat16():
    assert [mfu.kind("no", dtype) for dtype in ("bfloat16", "float16")] == ["bf16", "fp16"]
    assert mfu.kind("bf16", "float32") == "bf16" and mfu.kind("no") in ("fp32", "tf32")


def test_padding_is_no_work():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    assert float(models.pairs({"attention_mask": mask, "input_ids": mask})) == 9 + 1
    assert models.pairs({"input_ids": mask}) == 2 * 16


def test_a_meter_tells_the_share_of_the_peak():
    clock = VirtualClock()
    meter = Meter(torch.device("cpu"), mfu.Use(mfu.Work(token=6e9, pair=1e6), peak=1e12), clock=clock)
    clock.sleep(4)
    for _ in range(2):
        meter.add(torch.tensor(0.5), 100, torch.tensor(10_000.0))
    values = meter.read(SimpleNamespace(total=lambda sums: sums))
    assert values["mfu"] == pytest.approx((6e9 * 200 + 1e6 * 20_000) / 4 / 1e12)


FAST = """
import sys, train
from trainer import mfu
mfu.use = lambda work, device, precision, dtype: mfu.Use(work, 1e12)
sys.exit(train.main())
"""


@pytest.mark.train
def test_a_training_tells_mfu_where_the_gpu_is_known(tmp_path: Path):
    """The device's part is put in here, no GPU being at hand; all else is what runs on one. test_train.py sees that a run
    without a GPU tells nothing."""
    (tmp_path / "fast.py").write_text(FAST)
    args = [*TINY, "--dataset", str(texts(tmp_path / "texts")), "--max_steps", "3", "--eval_on_start", "false"]
    with Trainer(tmp_path / "run", args, script=tmp_path / "fast.py") as done:
        assert done.codes() == [0], done.everything()
    [world, *_], rows = done.events("world"), [row for row in done.events("metric") if "loss" in row]
    flops = world["flops_per_token"] + 16 * world["flops_per_pair"]  # blocks of 16 tokens
    assert len(rows) == 3 and world["peak_flops"] == 1e12 and done.output().count("  MFU ") == 3
    for row in rows:
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / world["peak_flops"]) and row["mfu"] > 0
