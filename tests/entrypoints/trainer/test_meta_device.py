"""Models that a task builds on the meta device: each tensor has the values that the constructor would give it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.entrypoints.training import ENTRYPOINTS

from trainer import meta_device, pretrained, weights  # isort: skip
from trainer.errors import Unsupported  # isort: skip

assert ENTRYPOINTS


class Own(nn.Module):
    """Initialised in all the ways that constructors use: by torch, by `apply`, by factories, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(40, 24), nn.Linear(24, 24)
        self.attention = nn.MultiheadAttention(24, 2)
        self.norm, self.batch = nn.LayerNorm(24), nn.BatchNorm1d(24)
        self.conv, self.gru = nn.Conv1d(24, 8, 3), nn.GRU(24, 8)
        self.scale, self.shift = nn.Parameter(torch.full((24,), 0.25)), nn.Parameter(torch.zeros(24))
        self.start = nn.Parameter(torch.randn(3, 24))
        self.register_buffer("steps", torch.ones(3), persistent=False)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight
        self.inner.apply(self._start)

    def _start(self, module: nn.Module) -> None:
        nn.init.normal_(module.weight, std=0.02)
        nn.init.constant_(module.bias, 0.5)


def build(kind: type[nn.Module] = Own) -> nn.Module:
    with torch.device("meta"):
        return kind()


def made(kind: type[nn.Module] = Own, seed: int = 3) -> nn.Module:
    model = meta_device.outlined(build(kind), lambda: build(kind), seed)
    weights.fill(model, torch.device("cpu"))
    return model


def test_every_tensor_is_initialised_as_the_constructor_does_it():
    model, whole = made(), Own()
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert model.head.weight is model.embed.weight
    for (name, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if other.std() == 0:
            assert torch.equal(mine, other), name
        else:
            assert mine.std().item() == pytest.approx(other.std().item(), rel=12 / mine.numel() ** 0.5), name
    for (name, mine), other in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(mine, other), name
    assert torch.isfinite(model.gru(torch.ones(2, 24))[0]).all()
    assert model.inner.weight.std() < 0.03, "what a constructor does to its modules counts, not what torch did before"
    again, other = made(), made(seed=4)
    assert all(torch.equal(mine, same) for mine, same in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.start, other.start)


def test_a_rank_draws_its_part_of_a_tensor():
    model = meta_device.outlined(build(), build, 3)
    assert all(each.is_meta for each in model.parameters())
    values = weights.take(model)
    part = values.part("inner.weight", model.inner.weight, (slice(8, 16), slice(0, 24)))
    assert torch.equal(part, made().inner.weight[8:16])


class Derived(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(3) * 0.1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))


@pytest.mark.parametrize(
    ("kind", "said"), [(Derived, "how start is initialised"), (Masked, "the buffer mask is on the meta device")]
)
def test_what_is_not_known_is_refused_by_name(kind: type[nn.Module], said: str):
    with pytest.raises(Unsupported, match=said):
        made(kind)


def config(**more):
    from transformers import AutoConfig

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoConfig.for_model("llama", **sizes, intermediate_size=48, **more)


def of_transformers() -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config())


def test_a_model_of_transformers_is_drawn_from_its_configuration():
    model = meta_device.outlined(of_transformers(), of_transformers, 3)
    assert all(each.is_meta for each in model.parameters()) and not any(each.is_meta for each in model.buffers())
    weights.fill(model, torch.device("cpu"))
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    assert torch.isfinite(model.eval()(torch.arange(16)[None]).logits).all()


def test_weights_are_read_from_files(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    stored = AutoModelForCausalLM.from_config(config())
    stored.save_pretrained(tmp_path)
    model = meta_device.outlined(of_transformers(), of_transformers, 3, str(tmp_path))
    weights.fill(model, torch.device("cpu"))
    ids = torch.arange(16)[None]
    assert torch.equal(model.eval()(ids).logits, stored.eval()(ids).logits)

    from safetensors.torch import save_model

    own = Own()
    save_model(own, str(tmp_path / "own.safetensors"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own.safetensors").rename(tmp_path / "own" / pretrained.WEIGHTS)
    mine = meta_device.outlined(build(), build, 3, str(tmp_path / "own"))
    weights.fill(mine, torch.device("cpu"))
    assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in own.state_dict().items())
    with pytest.raises(Unsupported, match="has no tensor with a name of this model"):
        meta_device.outlined(build(), build, 3, str(tmp_path))
