"""A model in memory, trained over nodes: what travels, what is learned, what comes back, what is refused."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import Dataset

from cloudtrain import DistributedTraining, Run, RunFailed, State
from cloudtrain.errors import BadRequest
from cloudtrain.training.distributed import TrainingResult
from tests.entrypoints.training import ENTRYPOINTS  # puts the trainer's rooms on the path

assert ENTRYPOINTS
LIMIT = {"limits": {"max_runtime": "4m"}, "env": {"OMP_NUM_THREADS": "1"}}


class Points(Dataset):
    """Numbers and a wave of them: 61 are no multiple of any global batch here."""

    def __init__(self, size: int = 61) -> None:
        self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], scaled(self.inputs[index]).sum()


def scaled(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.sin() * math.pi  # a function and a global of this module, which no node can import


class Wave(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(inputs)))


class Breaks(Points):
    """Data of which one sample cannot be read before a file is there."""

    def __init__(self, fixed: Path) -> None:
        super().__init__()
        self.fixed = fixed

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 40 and not self.fixed.exists():
            raise OSError("sample 40 is torn")
        return super().__getitem__(index)


def one_process(model: torch.nn.Module, data: Points, global_batch: int, epochs: int, seed: int = 42) -> list[float]:
    """Train as one process would with plain torch, on the same global batches; return the losses."""
    from trainer.data.samples import GlobalBatches

    order = GlobalBatches(len(data), global_batch, accumulation=1, world=1, rank=0, seed=seed, drop_last=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(epochs):
        for batch in order:
            inputs, target = (torch.stack(part) for part in zip(*(data[index] for index in batch), strict=True))
            loss = torch.nn.functional.mse_loss(model(inputs).squeeze(-1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        order.next_epoch()
    return losses


@pytest.mark.train
def test_three_nodes_learn_what_one_process_learns(census: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A class of a module that no node can import; gradients are synchronised, also where a rank has no sample left."""
    caplog.set_level(logging.INFO, logger="cloudtrain.training")
    model, data = Wave(), Points()
    alone = copy.deepcopy(model)
    expected = one_process(alone, data, global_batch=24, epochs=4, seed=7)
    result = DistributedTraining(target="local").train_distributed(
        model,
        data,
        nodes=3,
        use_gpus=False,
        epochs=4,
        batch_size=8,
        learning_rate=1e-2,
        seed=7,
        logging_steps=1,
        **LIMIT,
    )
    run = Run.find(result["run_id"])
    worlds = [event for event in run.store.events(run.run_id, "world") if "pid" in event.data]
    assert sorted(event.node for event in worlds) == [0, 1, 2]
    assert len({event.data["pid"] for event in worlds}) == 3
    assert {event.data["world_size"] for event in worlds} == {3}

    losses = [row.value for row in run.metrics("loss")]
    assert losses == pytest.approx(expected, abs=1e-5) and len(losses) == 12
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-5), name
    assert result == {
        "model_name": "Wave", "nodes_used": 3, "world_size": 3, "device": "cpu", "status": "distributed_trained",
        "final_loss": losses[-1], "run_id": run.run_id, "synthetic": False, "model": model,
    }  # fmt: skip
    assert result.keys() == TrainingResult.__required_keys__, "as docs/python.md has them"
    saved = saved_by(run, tmp_path)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())

    assert run.state is State.SUCCEEDED and run.run_id in [row.run_id for row in run.store.runs()]
    first, *_, last = caplog.messages
    assert "distributed training of Wave begins: 3 nodes" in first
    assert last == f"distributed training of Wave ends: 3 nodes, cpu, final loss {losses[-1]:.4f}"
    assert any(text.startswith("[0:0] step 12/12 ") for text in caplog.messages)


class Normed(Wave):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


@pytest.mark.train
def test_a_rank_without_samples_in_the_last_batch_has_enough_of_them_for_batch_norm(census: Path):
    result = DistributedTraining(target="local").train_distributed(
        Normed(), Points(36), nodes=2, use_gpus=False, epochs=2, batch_size=8, learning_rate=1e-2, **LIMIT
    )
    assert result["status"] == "distributed_trained" and math.isfinite(result["final_loss"])


def saved_by(run: Run, tmp_path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run.fetch(tmp_path / "fetched", ["model"]) / "model" / "model.safetensors")


class Silenced(DistributedTraining):
    """Synchronises to nothing: with plain descent no weight may move."""

    def __init__(self) -> None:
        super().__init__(target="local")
        self.said: list[str] = []

    def communication_hook(self):
        def nothing(state, bucket):
            done = torch.futures.Future()
            done.set_result(torch.zeros_like(bucket.buffer()))
            return done

        return nothing

    def log(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.train
def test_dictionaries_train_a_synthetic_model_and_hooks_are_heard(census: Path, tmp_path: Path):
    model, data = {"model_name": "NeuralNet_Model"}, {"samples": 1500, "features": 24}
    result = DistributedTraining(target="local").train_distributed(model, data, nodes=2, learning_rate=1e-2, **LIMIT)
    assert (result["model_name"], result["synthetic"], result["nodes_used"]) == ("NeuralNet_Model", True, 2)
    run = Run.find(result["run_id"])
    losses = [row.value for row in run.metrics("loss")]
    assert losses[-1] < losses[0] - 0.15 and losses[-1] == result["final_loss"]
    lines = [line.text for line in run.logs()]
    assert "data: 1,500 samples" in lines and any("; 2 x cpu, strategy ddp (replicate 2), " in line for line in lines)
    first, _, last = result["model"]
    assert (first.in_features, last.out_features) == (24, 2)

    silenced = Silenced()
    model = Wave()
    before = copy.deepcopy(model.state_dict())
    silenced.train_distributed(
        model, Points(), nodes=2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **LIMIT
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert silenced.said[0].startswith("distributed training of Wave begins")


@pytest.mark.train
def test_a_transformers_model_travels_without_a_pickle(census: Path, tmp_path: Path):
    from datasets import Dataset as Table
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    rows = [{"input_ids": [(start + at) % 32 for at in range(12)]} for start in range(40)]
    data = Table.from_list([row | {"labels": row["input_ids"]} for row in rows])
    result = DistributedTraining(target="local").train_distributed(
        model, data, nodes=2, epochs=6, batch_size=4, learning_rate=2e-2, **LIMIT
    )
    assert result["model_name"] == "GPT2LMHeadModel" and result["final_loss"] < 2.0
    run = Run.find(result["run_id"])
    shipped = run.store.home / "runs" / run.run_id / "a1" / "node-1" / "source" / "shipped"
    assert sorted(path.name for path in shipped.iterdir()) == ["data", "model"]

    again = GPT2LMHeadModel.from_pretrained(run.fetch(tmp_path / "out", ["model"]) / "model")
    ids = torch.tensor([rows[5]["input_ids"]])
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.train
def test_layers_of_a_language_model_are_split_and_its_data_is_an_address(census: Path, tmp_path: Path):
    from datasets import Dataset as Table
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    rows = [{"input_ids": [(start + at) % 32 for at in range(12)]} for start in range(8)]
    Table.from_list([row | {"labels": row["input_ids"]} for row in rows]).save_to_disk(tmp_path / "rows")
    ids = torch.tensor([row["input_ids"] for row in rows])
    with torch.no_grad():
        before = float(copy.deepcopy(model)(ids, labels=ids).loss)
    result = DistributedTraining(target="local").train_distributed(
        model, str(tmp_path / "rows"), nodes=2, epochs=3, batch_size=8, learning_rate=1e-2, logging_steps=1,
        parallelism={"tp_size": 2}, **LIMIT,
    )  # fmt: skip
    run = Run.find(result["run_id"])
    losses = [row.value for row in run.metrics("loss")]
    assert losses[0] == pytest.approx(before, abs=1e-5) and losses[2] < losses[1] < losses[0]
    (world,) = (event.data for event in run.store.events(run.run_id, "world") if "wrapper" in event.data)
    assert world["wrapper"] == "DTensor" and world["mesh"] == {"tensor": 2}
    with pytest.raises(BadRequest, match="tp_size 4 does not divide the model's 2 attention heads"):
        DistributedTraining(target="local").train_distributed(
            model, str(tmp_path / "rows"), nodes=4, parallelism={"tp_size": 4}
        )


@pytest.mark.train
def test_the_first_failing_rank_is_shown_and_recovered_from(census: Path, tmp_path: Path):
    """The traceback comes home; a subclass mends what was wrong, and the same run goes on to its end."""
    data = Breaks(tmp_path / "fixed")
    training = DistributedTraining(target="local")
    with pytest.raises(RunFailed) as failed:
        training.train_distributed(Wave(), data, nodes=2, epochs=2, batch_size=8, **LIMIT)
    hint, note = failed.value.__notes__
    assert hint == f"hint: {failed.value.hint}"
    assert note.startswith("node ") and "Traceback (most recent call last):" in note
    assert note.endswith("OSError: sample 40 is torn")
    assert failed.value.exit_code == 1

    class Mends(DistributedTraining):
        def recover(self, run, status):
            assert status.state is State.FAILED
            data.fixed.touch()
            return True

    result = Mends(target="local").train_distributed(Wave(), data, epochs=2, batch_size=8, **LIMIT)
    run = Run.find(result["run_id"])
    assert [attempt.status.state for attempt in run.attempts] == [State.FAILED, State.SUCCEEDED]


class TornOnce(Points):
    """Data of which one sample fails once, when it is read for the second epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.read, self.torn = folder / "read", folder / "torn"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 40:
            if self.read.exists() and not self.torn.exists():
                self.torn.touch()
                raise OSError("sample 40 is torn")
            self.read.touch()
        return super().__getitem__(index)


@pytest.mark.train
def test_a_run_that_fails_after_a_checkpoint_resumes_by_default_and_learns_the_same(census: Path, tmp_path: Path):
    model = Wave()
    alone = copy.deepcopy(model)
    expected = one_process(alone, Points(), global_batch=16, epochs=2)
    result = DistributedTraining(target="local").train_distributed(
        model, TornOnce(tmp_path), processes_per_node=2, epochs=2, batch_size=8, learning_rate=1e-2, logging_steps=1,
        save_steps=1, **LIMIT,
    )  # fmt: skip
    run = Run.find(result["run_id"])
    assert [attempt.status.state for attempt in run.attempts] == [State.FAILED, State.SUCCEEDED]
    assert any("resum" in line.text for line in run.logs() if line.rank == 0)
    assert result["final_loss"] == pytest.approx(expected[-1], abs=1e-5)
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-5), name


class Stream(torch.utils.data.IterableDataset):
    """The samples of Points, one after the other."""

    def __iter__(self):
        points = Points()
        return (points[index] for index in range(len(points)))


def one_process_of_a_stream(model: torch.nn.Module, steps: int, rate: float, norm: float) -> list[float]:
    """Train as one process would with plain torch: 16 samples a step, clipped, the rate falling as a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    samples, losses = [*Stream(), *Stream()], []
    for batch in (samples[at : at + 16] for at in (0, 16, 32, 48, 61, 77)):
        batch = batch[:13] if len(losses) == 3 else batch  # an epoch ends with what is left
        inputs, target = (torch.stack(part) for part in zip(*batch, strict=True))
        loss = torch.nn.functional.mse_loss(model(inputs).squeeze(-1), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.train
def test_any_module_is_sharded_and_learns_a_stream_with_all_that_the_loop_does(census: Path):
    """FSDP, accumulation, clipping, a schedule, an IterableDataset over two passes, evaluations."""
    model = Wave()
    alone = copy.deepcopy(model)
    expected = one_process_of_a_stream(alone, 6, 1e-2, 0.5)
    result = DistributedTraining(target="local").train_distributed(
        model, Stream(), nodes=2, batch_size=4, gradient_accumulation_steps=2, max_steps=6, learning_rate=1e-2,
        lr_scheduler_type="cosine", max_grad_norm=0.5, eval_data=Points(7), logging_steps=1, eval_on_start=False,
        parallelism={"strategy": "fsdp"}, **LIMIT,
    )  # fmt: skip
    run = Run.find(result["run_id"])
    assert [row.value for row in run.metrics("loss")] == pytest.approx(expected, abs=1e-5)
    for name, value in alone.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-5), name
    (world,) = (event.data for event in run.store.events(run.run_id, "world") if "wrapper" in event.data)
    assert world["wrapper"] == "FSDP2" and max(world["parameters_per_rank"]) < 97 * 0.7
    held_out = [Points(7)[index] for index in range(7)]
    inputs, target = (torch.stack(part) for part in zip(*held_out, strict=True))
    with torch.no_grad():
        left = float(torch.nn.functional.mse_loss(alone(inputs).squeeze(-1), target))
    (evaluated,) = run.metrics("eval_loss")
    assert evaluated.step == 6 and evaluated.value == pytest.approx(left, abs=1e-5)


CANNOT = {
    "a torch module in layers": (
        {"parallelism": {"tp_size": 2}},
        "a model or a loss of your own works with strategies none, ddp",
    ),
    "a stream without an end": ({"data": Stream()}, "--streaming needs --max_steps"),
    "compressed shards": (
        {"gradient_compression": "fp16", "parallelism": {"strategy": "fsdp"}},
        "--gradient_compression works with strategy ddp, not with fsdp",
    ),
    "a batch of no ranks": ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps must be at least 1"),
    "an argument of the shared trainer": ({"block_size": 64}, "block_size is an argument of the shared trainer"),
    "not a key of a job file": ({"batch_sise": 64}, "batch_sise"),
    "held-out numbers": ({"eval_data": [1, 2]}, "a sample of the data is a int"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_the_loop_cannot_do_is_refused_before_submit(home: Path, case: str):
    options, sentence = CANNOT[case]
    with pytest.raises(BadRequest, match=sentence):
        DistributedTraining(target="local").train_distributed(Wave(), **{"data": Points(), "nodes": 2} | options)
    assert not (home / "runs").exists()


def test_a_hook_and_shards_exclude_each_other(home: Path):
    with pytest.raises(BadRequest, match="a communication hook works with strategy ddp"):
        Silenced().train_distributed(Wave(), Points(), nodes=2, parallelism={"strategy": "zero2"})
    assert not (home / "runs").exists()


class Hostile:
    def __reduce__(self):
        raise TypeError("cannot pickle a lock")


def locked() -> torch.nn.Module:
    model = torch.nn.Linear(1, 1)
    model.lock = Hostile()
    return model


REFUSED = {
    "no model": ("net", [(1, 2)], "a str is not a model that can be trained"),
    "nothing to train": (torch.nn.Flatten(), [(1, 2)], "Flatten has no parameter"),
    "iterator": (torch.nn.Linear(1, 1), iter([1]), "not a map-style dataset and not an IterableDataset"),
    "empty": (torch.nn.Linear(1, 1), [], "the dataset is empty"),
    "no target": (torch.nn.Linear(1, 1), [torch.ones(1)], "a sample of the data is a Tensor"),
    "half synthetic": (torch.nn.Linear(1, 1), {"samples": 3}, "needs both dictionaries"),
    "strange": ({"model_name": "a", "layers": 3}, {"samples": 3}, "has no option layers"),
    "not a number": ({"model_name": "a"}, {"samples": "many"}, "samples must be a whole number above 0"),
    "too much": ({"model_name": "a"}, {"samples": 10**9, "features": 128}, "over 1 GiB"),
    "no pickle": (
        locked(),
        [(torch.ones(1), torch.ones(1))],
        "the attribute lock of model cannot be sent: TypeError: cannot pickle a lock",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sent_is_refused_before_anything_is(home: Path, case: str):
    model, data, sentence = REFUSED[case]
    with pytest.raises(BadRequest, match=sentence) as refused:
        DistributedTraining(target="local").train_distributed(model, data)
    assert "\n" not in str(refused.value)
    assert not (home / "runs").exists() and not (home / "bundles").exists()


def test_a_hook_that_refers_to_the_training_is_refused():
    class Tangled(DistributedTraining):
        def communication_hook(self):
            return lambda state, bucket: self.log("here")

    with pytest.raises(BadRequest, match="a Tangled cannot be sent to the nodes"):
        Tangled(target="local").train_distributed(Wave(), Points())
