"""A model given as an object is trained by every strategy as one process would train it with plain torch."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from cloudtrain.training import shipping
from tests.entrypoints.training import ENTRYPOINTS, Trainer

pytestmark = pytest.mark.train
GLOBAL, STEPS, RATE = 8, 4, 1e-2
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
FEATURES = torch.randn(29, 4, generator=torch.Generator().manual_seed(3))
ROWS = [[(start + at) % 32 for at in range(12)] for start in range(16)]


class Net(torch.nn.Module):
    """Two blocks, of which one parameter is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 16), torch.nn.Linear(16, 16)])
        self.last = torch.nn.Linear(16, 1)
        self.blocks[0].bias.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden)


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return FEATURES[index], FEATURES[index].sin().sum(0, keepdim=True)


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, max_position_embeddings=32))


def one_process(model: Any, loss: Any, samples: int) -> tuple[torch.nn.Module, list[float]]:
    """Train with plain torch on the same global batches, `loss(model, indices)`; return the model and its losses."""
    from trainer.data.samples import GlobalBatches

    model, losses = copy.deepcopy(model), []
    order = GlobalBatches(samples, GLOBAL, accumulation=1, world=1, rank=0, seed=42, drop_last=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    while len(losses) < STEPS:
        for batch in order:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
            if len(losses) == STEPS:
                break
        order.next_epoch()
    return model, losses


def train(
    run: Path, model: Any, data: Any, world: int, parallelism: dict, *more: str, loss: Any = None, parts: Any = None
) -> Trainer:
    """Send a model and train it; it has the trained values afterwards."""
    run.mkdir()
    shipping.ship(
        run, model, {"data": data, "eval_data": (parts or {}).pop("eval_data", None)}, {"loss": loss, **(parts or {})}
    )
    split = math.prod(parallelism.get(key, 1) for key in ("tp_size", "pp_size", "cp_size"))
    accumulation, size = 2, {"per_device_train_batch_size": GLOBAL // (world // split) // 2}
    size |= {"gradient_accumulation_steps": accumulation, "max_steps": STEPS, "learning_rate": RATE}
    args = [
        f"--{name}={value}" for name, value in {**size, "logging_steps": 1, **shipping.sizes_of(model, loss)}.items()
    ]
    script, env = ENTRYPOINTS / "trainer" / "pickled.py", {"CLOUDTRAIN_PARALLELISM": json.dumps(parallelism)}
    with Trainer(run, [*args, *more], world, env, script=script) as trainer:
        assert trainer.codes() == [0] * world, trainer.everything()
    shipping.put(run / "model", model)
    return trainer


STRATEGIES = {
    "none": ({"strategy": "none"}, 1),
    "ddp": ({"strategy": "ddp"}, 2),
    "fsdp": ({"strategy": "fsdp"}, 2),
    "hsdp": ({"strategy": "hsdp", "dp_replicate_size": 2}, 4),
    "zero1": ({"strategy": "zero1"}, 2),
    "zero2": ({"strategy": "zero2"}, 2),
    "zero3": ({"strategy": "zero3"}, 2),
}
SPLIT = {"tp": ({"tp_size": 2}, 2), "pp": ({"pp_size": 2}, 2), "cp": ({"cp_size": 2}, 2)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_module_by_any_loss(tmp_path: Path, strategy: str):
    """An uneven last batch, a layer that is not trained, a loss of the user's own."""
    parallelism, world = STRATEGIES[strategy]

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.smooth_l1_loss(outputs, target)

    def of_batch(model: torch.nn.Module, batch: list[int]) -> torch.Tensor:
        inputs, target = (torch.stack(part) for part in zip(*map(sample, batch), strict=True))
        return loss(model(inputs), target)

    model = Net()
    alone, expected = one_process(model, of_batch, len(FEATURES))
    trainer = train(tmp_path / "run", model, [sample(at) for at in range(29)], world, parallelism, loss=loss)
    assert list(trainer.losses().values()) == pytest.approx(expected, abs=1e-5)
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-5), name
    [facts] = [event for event in trainer.events("world") if "wrapper" in event]
    parts = 1 if strategy in ("none", "ddp", "zero1", "zero2") else 2
    assert facts["strategy"] == strategy and facts["world_size"] == world
    assert max(facts["parameters_per_rank"]) < 369 / parts * 1.1 and sum(facts["parameters_per_rank"]) >= 369


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_language_model_whose_layers_or_sequences_are_split(tmp_path: Path, strategy: str):
    parallelism, world = SPLIT[strategy]
    model = llama()
    ids = torch.tensor(ROWS)
    alone, expected = one_process(model, lambda mine, batch: mine(ids[batch], labels=ids[batch]).loss, len(ROWS))
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = train(tmp_path / "run", model, data, world, parallelism)
    assert list(trainer.losses().values()) == pytest.approx(expected, abs=1e-4)
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-4), name
    [facts] = [event for event in trainer.events("world") if "wrapper" in event]
    assert facts["mesh"] == {{"tp": "tensor", "pp": "pipeline", "cp": "context"}[strategy]: 2}


def test_precision_schedule_and_evaluations(tmp_path: Path):
    """What the arguments ask for is what runs: each changes the losses, or the numbers that are reported."""
    data = [sample(at) for at in range(29)]
    plain = train(tmp_path / "plain", Net(), data, 2, {"strategy": "ddp"})
    more = [
        "--bf16", "--gradient_compression=fp16", "--lr_scheduler_type=cosine",
        "--warmup_steps=2", "--eval_strategy=steps", "--eval_steps=2",
    ]  # fmt: skip
    parts = {"eval_data": data[:7], "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.5)}
    full = train(tmp_path / "full", Net(), data, 2, {"strategy": "ddp"}, *more, parts=parts)
    [facts] = [event for event in full.events("world") if "wrapper" in event]
    assert facts["mixed_precision"] == "bf16"
    rates = [row["learning_rate"] for row in full.events("metric") if "loss" in row]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.25])
    assert sorted(full.held_out()) == [0, 2, 4]
    assert full.losses()[1] == pytest.approx(plain.losses()[1], abs=0.05) and full.losses()[1] != plain.losses()[1]


def test_gradients_are_compressed_and_clipped(tmp_path: Path):
    """One step of plain descent at a rate of 1 moves the parameters by their gradients."""
    parts = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}
    moved = {}
    for argument in ("--gradient_compression=no", "--gradient_compression=fp16", "--max_grad_norm=0.1"):
        model, data = Net(), [sample(at) for at in range(8)]
        before = torch.nn.utils.parameters_to_vector(copy.deepcopy(model).parameters())
        more = (argument, "--max_steps=1")
        train(tmp_path / argument[2:], model, data, 2, {"strategy": "ddp"}, *more, parts=dict(parts))
        moved[argument[2:]] = (before - torch.nn.utils.parameters_to_vector(model.parameters())).detach()
    plain, rounded, clipped = moved.values()
    assert rounded.tolist() == pytest.approx(plain.tolist(), rel=0.01, abs=1e-3)
    assert not torch.allclose(plain, rounded, rtol=1e-5, atol=0)
    assert float(plain.norm()) > 0.3 and float(clipped.norm()) == pytest.approx(0.1, rel=1e-3)
    assert torch.allclose(clipped / clipped.norm(), plain / plain.norm(), atol=1e-4)


class Uneven(torch.utils.data.IterableDataset):
    """Eleven samples, of which a reader yields its part."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return map(sample, range(11) if info is None else range(11)[info.id :: info.num_workers])


def test_ranks_that_read_shards_of_unequal_length_end_an_epoch_together(tmp_path: Path):
    model, alone = Net(), Net()
    optimizer = torch.optim.AdamW([each for each in alone.parameters() if each.requires_grad], lr=RATE)
    expected = []
    for batch in (range(8), range(8, 11)) * (STEPS // 2):
        inputs, target = (torch.stack(part) for part in zip(*map(sample, batch), strict=True))
        optimizer.zero_grad()
        loss = functional.mse_loss(alone(inputs), target)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    trainer = train(tmp_path / "run", model, Uneven(), 2, {"strategy": "ddp"}, "--streaming")
    assert list(trainer.losses().values()) == pytest.approx(expected, abs=1e-5)
    assert "data: a stream of samples, of which each rank reads its own shards" in trainer.output()


class ByRank(torch.utils.data.IterableDataset):
    """Divides its samples itself: of what a rank reads, others would take most."""

    def __iter__(self):
        import os

        return map(sample, range(11)[int(os.environ["RANK"]) :: 2])


def test_a_stream_that_differs_between_ranks_is_refused(tmp_path: Path):
    shipping.ship(tmp_path, Net(), {"data": ByRank()}, {})
    args = ["--streaming", "--max_steps=2"]
    with Trainer(tmp_path, args, 2, script=ENTRYPOINTS / "trainer" / "pickled.py") as trainer:
        assert trainer.codes() == [78, 78], trainer.everything()
    assert "rank 1 reads another first sample than rank 0" in trainer.output()


def test_an_adapter_comes_back(tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in ROWS]
    trainer = train(tmp_path / "run", model, data, 2, {"strategy": "fsdp"})
    [facts] = [event for event in trainer.events("world") if "wrapper" in event]
    assert max(facts["learned_per_rank"]) <= 2 * 2 * 16 * 2
    moved = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert moved and all("lora_" in name for name in moved)
    with torch.no_grad():
        ids = torch.tensor(ROWS)
        assert float(model(ids, labels=ids).loss) < list(trainer.losses().values())[0]
