"""What travels of a model in memory: parameters in files of their own, the rest by pickle; and what is read back."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from cloudtrain.errors import BadRequest
from cloudtrain.training import pickling, shipping
from tests.entrypoints.training import ENTRYPOINTS

from trainer import in_memory_model  # isort: skip
from trainer.errors import Unsupported  # isort: skip
from trainer.weights import fill  # isort: skip

assert ENTRYPOINTS


class Tied(torch.nn.Module):
    """Two layers of one matrix, a frozen one, a buffer and a cached tensor; the constructor takes what no file has."""

    def __init__(self, secret: object) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(8)
        self.first.bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs)))


def on_a_rank(folder: Path) -> torch.nn.Module:
    shipped = folder / "shipped"
    if (shipped / "model").exists():
        return in_memory_model.outlined(shipped / "model", shipped / "frozen.json", 42)
    return in_memory_model.unpickled(shipped, 42)["model"]


def test_parameters_of_any_module_are_files_and_a_rank_has_them_without_values(tmp_path: Path):
    model = Tied(object())
    model.norm.running_mean += 3
    assert shipping.ship(tmp_path, model, {}, {}) == []
    size = sum(each.numel() * 4 for each in model.parameters())
    assert (tmp_path / "shipped" / "parts.pkl").stat().st_size < 8000
    assert 0 < (tmp_path / "shipped" / "arrays").stat().st_size - size < 1000
    again = on_a_rank(tmp_path)
    assert all(parameter.is_meta for parameter in again.parameters())
    assert again.last.weight is again.first.weight and not again.first.bias.requires_grad
    fill(again, torch.device("cpu"))
    assert again.last.weight is again.first.weight and not again.first.bias.requires_grad
    inputs = torch.randn(3, 8)
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))


def test_a_model_of_transformers_keeps_its_frozen_layers_and_its_type(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).to(torch.bfloat16)
    model.model.embed_tokens.requires_grad_(False)
    shipping.ship(tmp_path, model, {}, {})
    assert not (tmp_path / "shipped" / "parts.pkl").exists()
    again = on_a_rank(tmp_path)
    assert all(parameter.is_meta for parameter in again.parameters())
    fill(again, torch.device("cpu"))
    assert [name for name, each in again.named_parameters() if not each.requires_grad] == ["model.embed_tokens.weight"]
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert again.dtype is torch.bfloat16


def test_a_changed_model_of_transformers_travels_as_it_is(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    assert shipping.rebuilds(model)
    model.lm_head = torch.nn.Linear(16, 5)
    assert not shipping.rebuilds(model)
    shipping.ship(tmp_path, model, {}, {})
    again = on_a_rank(tmp_path)
    fill(again, torch.device("cpu"))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


def test_parameters_on_one_memory_are_trained_each_by_itself(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach())
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("scalar", torch.nn.Parameter(torch.tensor(1 + 2j)))
    assert shipping.ship(tmp_path, model, {}, {}) == []
    again = on_a_rank(tmp_path)
    fill(again, torch.device("cpu"))
    assert torch.equal(again[1].weight, model[0].weight) and again.scalar.item() == 1 + 2j
    assert again[0].weight.data_ptr() != again[1].weight.data_ptr()


def test_what_an_older_version_has_sent_is_refused_by_its_name(tmp_path: Path):
    """An attached run has the source of the version that submitted it, and the trainer of the one that resumes it."""
    assert shipping.ship(tmp_path, Tied(None), {}, {}) == []
    (tmp_path / "shipped" / "weights").mkdir()
    with pytest.raises(
        Unsupported, match="an older version of cloudtrain has sent this model.* call train_distributed again"
    ):
        on_a_rank(tmp_path)


class Own(torch.nn.Parameter):
    pass


def test_a_model_that_is_pickled_whole_says_so_and_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
    model[1].weight = Own(model[0].weight.detach())
    [note] = shipping.ship(tmp_path, model, {}, {})
    assert note == "each rank loads the whole model: 1.weight is a Own of its own kind"
    again = on_a_rank(tmp_path)
    assert torch.equal(again[1].weight, model[0].weight) and not again[0].weight.is_meta
    monkeypatch.setattr(shipping, "LARGE_BYTES", 10_000)
    (tmp_path / "more").mkdir()
    assert shipping.ship(tmp_path / "more", model, {}, {})[1].startswith("model and data take 0.0 GB of the bundle")


def test_values_are_read_back_from_several_files(tmp_path: Path):
    from safetensors.torch import save_file

    model, trained = Tied(0), Tied(0)
    trained.norm.running_var *= 2
    state = {name: value for name, value in trained.state_dict().items() if name != "last.weight"}
    for number, part in enumerate((list(state)[:2], list(state)[2:]), 1):
        save_file({name: state[name] for name in part}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    assert shipping.read_values(model, tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in trained.state_dict().items())
    before = model.norm.running_var.clone()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert not shipping.read_values(model, tmp_path) and torch.equal(model.norm.running_var, before)


def test_an_open_file_and_the_attribute_that_cannot_be_pickled_are_named(tmp_path: Path):
    import threading

    class Locked(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.lock = threading.Lock()

    handle = open(__file__)  # noqa: SIM115
    for part, sentence in (
        (
            {"loss": lambda outputs, target: handle.read()},
            "the variable handle of loss cannot be sent: it is an open file",
        ),
        ({"model": Locked()}, "the attribute lock of model cannot be sent: it is a lock"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            pickling.dump(part, tmp_path)
    handle.close()
    pickling.dump({"data": io.BytesIO(b"1"), "loss": print}, tmp_path)
