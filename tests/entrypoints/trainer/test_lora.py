"""LoRA under every strategy that carries it, against one process: the adapter learns the same, the model below it stays."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.entrypoints.training import TINY, Trainer, texts, train

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]

STEPS = 15
LORA = "--use_peft --lora_r 2 --lora_alpha 8 --lora_dropout 0 --lora_target_modules all-linear"
SIZES = f"--max_steps {STEPS} --max_grad_norm 0.03 --gradient_accumulation_steps 2 --max_eval_samples 13"
LEARNED = 2 * (4 * 2 * (32 + 32) + 3 * 2 * (32 + 64))  # both matrices of rank 2 beside the seven of either layer
CASES = {
    "ddp": (2, {"strategy": "ddp"}, "DistributedDataParallel", 1.0),
    "fsdp": (2, {"strategy": "fsdp"}, "FSDP2", 0.5),
    "hsdp": (4, {"strategy": "hsdp", "dp_replicate_size": 2}, "FSDP2", 0.5),
    "fsdp, cp": (2, {"strategy": "fsdp", "cp_size": 2}, "FSDP2", 0.5),
    "cp": (2, {"cp_size": 2}, "DistributedDataParallel", 1.0),
    "zero1": (2, {"strategy": "zero1"}, "DeepSpeedEngine", 1.0),
    "zero2": (2, {"strategy": "zero2"}, "DeepSpeedEngine", 1.0),
    "zero3": (2, {"strategy": "zero3"}, "DeepSpeedEngine", 0.5),
}
NAMES = [name if name in ("ddp", "fsdp") else pytest.param(name, marks=pytest.mark.long) for name in CASES]
# What the trainer has at its end is kept before the adapter is merged or parted from it.
KEEPING = """
import os, sys, torch, train
from trainer.loop import Loop
real = Loop.run
def run(self, **given):
    stopped, strategy = real(self, **given), self.strategy
    state = dict(strategy.tensors(list(strategy.accelerator.unwrap_model(strategy.model).state_dict())))
    if strategy.rank == 0:
        torch.save(state, os.environ["KEPT"])
    return stopped
Loop.run = run
sys.exit(train.main())
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that was trained before, with its tokenizer."""
    folder = tmp_path_factory.mktemp("lora")
    data = ["--dataset", str(texts(folder / "texts"))]
    train(folder / "base", [*TINY, *data, "--max_steps", "10"])
    (folder / "keeping.py").write_text(KEEPING)
    return folder


@pytest.fixture(scope="module")
def one(base: Path) -> Trainer:
    """What one process makes of it."""
    return adapt(base, base / "one", 1, {})


def adapt(base: Path, run: Path, world: int, parallelism: dict, *more: str, attempt: int = 1) -> Trainer:
    """Adapt the model, eight samples a step whatever the world."""
    args = ["--model", str(base / "base" / "model"), "--dataset", str(base / "texts"), "--block_size", "16", *more]
    args += shlex.split(f"{LORA} {SIZES} --learning_rate 5e-3 --logging_steps 1 --sample_tokens 4")
    batch = 4 * parallelism.get("cp_size", 1) // world
    args += ["--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", "3"]
    env = {"CLOUDTRAIN_CHECKPOINT_EVERY_STEPS": "5", "CLOUDTRAIN_CHECKPOINT_KEEP": "9", "KEPT": run / f"{attempt}.pt"}
    env["CLOUDTRAIN_PARALLELISM"] = json.dumps(parallelism)
    with Trainer(run, args, world, env, attempt, base / "keeping.py") as adapted:
        assert adapted.codes() == [0] * world, adapted.everything()
    return adapted


def furthest(one: dict, other: dict) -> float:
    assert one.keys() == other.keys() and one
    return max(abs(one[key] - other[key]) for key in one)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_learns_as_on_one_process(tmp_path: Path, base: Path, one: Trainer, name: str, figure: Callable):
    """Losses, norms and adapter agree; the model below stays to the bit; killed and resumed it goes on to the bit."""
    world, parallelism, wrapper, share = CASES[name]
    many = adapt(base, tmp_path / "run", world, parallelism)
    loss = furthest(one.losses(), many.losses())
    norm = max(abs(many.norms()[step] - found) / found for step, found in one.norms().items())
    held = furthest(one.held_out(), many.held_out())
    assert len(one.losses()) == STEPS and max(one.norms().values()) > 0.03 and one.held_out()[STEPS] < one.held_out()[0]
    assert loss < 1e-5 and norm < 1e-4 and held < 1e-5

    event = many.events("world")[0]
    assert (event["world_size"], event["wrapper"], event["parameters_learned"]) == (world, wrapper, LEARNED)
    assert event["parameters_per_rank"] == [round(event["parameters"] * share)] * world
    assert event["learned_per_rank"] == [round(LEARNED * share)] * world and event["parameters"] / 5 > LEARNED
    if name.startswith("zero"):
        assert event["optimized_per_rank"] == [LEARNED // world] * world
    else:
        norms = many.events("world")[1]["gradient_norms_per_rank"]
        assert len(norms) == world and norms[0] > 0 and (name != "ddp" or norms[0] == norms[1])

    before = load_file(base / "base" / "model" / "model.safetensors")
    first, second = torch.load(one.run / "1.pt"), torch.load(tmp_path / "run" / "1.pt")
    assert first.keys() == second.keys() and sum("lora" in key for key in first) == 2 * 7 * 2
    apart = max((first[key] - second[key]).abs().max().item() for key in first if "lora" in key)
    assert apart < 2e-4
    stayed = {
        key.removeprefix("base_model.model.").replace(".base_layer", ""): key for key in second if "lora" not in key
    }
    assert before.keys() <= stayed.keys() and all(torch.equal(before[key], second[stayed[key]]) for key in before)
    assert sample(one) == sample(many), "the text was written without the adapter, or by a part of the model"
    folder = tmp_path / "run" / "model"
    assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert len(load_file(folder / "adapter_model.safetensors")) == 2 * 7 * 2
    figure("lora", {"name": name, "world": world, "loss": loss, "norm": norm, "adapter": apart})

    for step in (10, 15):  # as if it had been killed after step 5
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}.a1" / "COMPLETE").unlink()
    folder = folder.rename(tmp_path / "adapter")
    again = adapt(base, tmp_path / "run", world, parallelism, "--merge_adapter", attempt=2)
    assert again.losses() == {step: loss for step, loss in many.losses().items() if step > 5}
    third = torch.load(tmp_path / "run" / "2.pt")
    assert second.keys() == third.keys() and all(torch.equal(second[key], third[key]) for key in second)
    check_it_loads(base / "base" / "model", folder, tmp_path / "run" / "model")


def sample(run: Trainer) -> str:
    return re.search(r"^sample:\n((?: {4}.*\n)+)", run.output(), re.MULTILINE)[1]


def check_it_loads(base: Path, adapter: Path, whole: Path) -> None:
    """The adapter beside its model, and the model with the adapter in it, say the same."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain, merged = AutoModelForCausalLM.from_pretrained(base), AutoModelForCausalLM.from_pretrained(whole)
    before, after = plain.state_dict(), merged.state_dict()
    moved = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    adapted = PeftModel.from_pretrained(plain, adapter)
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-4)


@pytest.mark.long
def test_an_adapter_goes_on_in_another_layout(tmp_path: Path, base: Path):
    """Written in parts, read by one process and by ddp; written by ddp, read in parts."""
    for written, read in (("fsdp", "none"), ("fsdp", "ddp"), ("ddp", "fsdp")):
        run = tmp_path / f"{written} {read}"
        before = adapt(base, run, *CASES[written][:2]).losses()
        for step in (10, 15):
            (run / "checkpoints" / f"step-{step:08d}.a1" / "COMPLETE").unlink()
        world, parallelism = (1, {}) if read == "none" else CASES[read][:2]
        again = adapt(base, run, world, parallelism, attempt=2).losses()
        assert furthest({step: before[step] for step in range(6, STEPS + 1)}, again) < 1e-5
