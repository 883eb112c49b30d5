"""Weights in bfloat16 under every strategy, against one process with the same: frozen ones below an adapter, and trained ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.entrypoints.training import TINY, Trainer, texts, train

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]

STEPS = 8
LORA = "--use_peft --lora_r 2 --lora_alpha 8 --lora_dropout 0 --lora_target_modules all-linear"
SIZES = (
    f"--max_steps {STEPS} --max_eval_samples 12 --per_device_eval_batch_size 3 --learning_rate 2e-3 --dtype bfloat16"
)
CASES = {
    "lora, fsdp": (2, {"strategy": "fsdp"}, LORA),
    "fsdp": (2, {"strategy": "fsdp"}, ""),
}
LONG = {
    "lora, ddp": (2, {"strategy": "ddp"}, LORA),
    "lora, hsdp": (4, {"strategy": "hsdp", "dp_replicate_size": 2}, LORA),
    "lora, cp": (2, {"cp_size": 2}, LORA),
    "lora, fsdp, bf16": (2, {"strategy": "fsdp"}, f"{LORA} --bf16"),
    "lora, zero1, bf16": (2, {"strategy": "zero1"}, f"{LORA} --bf16"),
    "lora, zero2, bf16": (2, {"strategy": "zero2"}, f"{LORA} --bf16"),
    "lora, zero3, bf16": (2, {"strategy": "zero3"}, f"{LORA} --bf16"),
    "ddp": (2, {"strategy": "ddp"}, ""),
    "ddp, bf16": (2, {"strategy": "ddp"}, "--bf16"),
    "fsdp, bf16": (2, {"strategy": "fsdp"}, "--bf16"),
    "tp": (2, {"tp_size": 2}, ""),
    "pp": (2, {"pp_size": 2}, ""),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that was trained before, with its tokenizer, and the texts."""
    folder = tmp_path_factory.mktemp("dtype")
    data = ["--dataset", str(texts(folder / "texts"))]
    train(folder / "base", [*TINY, *data, "--max_steps", "10"])
    return folder


@pytest.fixture(scope="module")
def alone(base: Path) -> Callable[[str], Trainer]:
    """Return the run of one process that a case is compared with; each is trained once."""
    made: dict[str, Trainer] = {}

    def run(more: str) -> Trainer:
        if more not in made:
            made[more] = tuned(base, base / str(len(made)), 1, {}, more)
        return made[more]

    return run


def tuned(base: Path, run: Path, world: int, parallelism: dict, more: str) -> Trainer:
    """Train on eight samples a step whatever the world."""
    batch = 8 // (1 if {"tp_size", "pp_size", "cp_size"} & parallelism.keys() else world)
    args = ["--model", str(base / "base" / "model"), "--dataset", str(base / "texts"), "--block_size", "16"]
    args += shlex.split(f"{SIZES} {more} --logging_steps 1 --sample_tokens 4 --per_device_train_batch_size {batch}")
    return train(run, args, world, CLOUDTRAIN_PARALLELISM=json.dumps(parallelism))


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_weights_in_bfloat16_learn_as_on_one_process(
    tmp_path: Path, base: Path, alone: Callable[[str], Trainer], figure: Callable, name: str
):
    world, parallelism, more = (CASES | LONG)[name]
    one, many = alone(more), tuned(base, tmp_path / "run", world, parallelism, more)
    first, second = one.losses(), many.losses()
    assert len(first) == STEPS and first.keys() == second.keys() and one.held_out()[STEPS] < one.held_out()[0]
    loss = max(abs(first[step] - second[step]) for step in first)
    held = max(abs(found - many.held_out()[step]) for step, found in one.held_out().items())
    file = "adapter_model.safetensors" if LORA in more else "model.safetensors"
    weights, others = (load_file(run.run / "model" / file) for run in (one, many))
    assert weights.keys() == others.keys()
    apart = max((weights[name] - others[name]).abs().max().item() for name in weights)
    figure("dtype", {"name": name, "loss": loss, "held": held, "weights": apart})
    # What learns is in float32, and so are its gradients; attention over parts of a sequence rounds in another order.
    exact = more == LORA and "cp_size" not in parallelism
    assert loss < (1e-5 if exact else 1e-3) and held < (1e-5 if exact else 5e-4)
    assert apart < (1e-4 if exact else 1e-2)
    for kept in (weights, others):
        assert {tensor.dtype for tensor in kept.values()} == {torch.float32 if LORA in more else torch.bfloat16}
    assert " parameters in bfloat16, " in many.output()
