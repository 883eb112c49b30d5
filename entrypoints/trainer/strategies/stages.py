"""Split a model into pipeline stages, each with the model's own forward pass over some layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import Unsupported
from .mesh import check_layers


@dataclass(frozen=True)
class LayerPlan:
    """Where a family keeps what stands before its layers, the layers, and what stands behind them; names of modules of
    the base model."""

    before: tuple[str, ...]
    layers: str
    behind: tuple[str, ...]


# transformers has plans for Llama, Qwen, Mistral and models of the same family; this is for those that it has none for.
OWN = {"gpt2": LayerPlan(("wte", "wpe", "drop"), "h", ("ln_f",))}


def plan_of(model: Any) -> LayerPlan:
    """Return how a model is cut; raises Unsupported for a family without a plan."""
    config = model.config
    if config.model_type in OWN:
        return OWN[config.model_type]
    names = list(config.base_model_pp_plan or ())
    if "layers" not in names:
        families = ", ".join(["llama", "qwen2", "qwen3", "mistral", *OWN])
        raise Unsupported(
            f"there is no pipeline plan for {config.model_type}; there are plans for {families} and models of the same family"
        )
    at = names.index("layers")
    return LayerPlan(tuple(names[:at]), "layers", tuple(names[at + 1 :]))


class Same(nn.Module):
    """Stands in for a layer that another stage has: hands on what it gets."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class Nothing(nn.Module):
    """Stands in for an embedding that the first stage has added already."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=ids.device)


class Stage(nn.Module):
    """The first, the last or a middle part of a causal language model: token ids or hidden states in, hidden states or
    logits out."""

    def __init__(self, model: Any, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.first, self.last = model, first, last

    def forward(self, inputs_or_hidden: torch.Tensor, **inputs: Any) -> torch.Tensor:
        name = "input_ids" if self.first else "inputs_embeds"
        hidden: torch.Tensor = self.model.base_model(**{name: inputs_or_hidden}, **inputs).last_hidden_state
        return self.model.get_output_embeddings()(hidden) if self.last else hidden


def check_cut(model: Any, count: int) -> None:
    """Raise Unsupported unless the model can be cut into so many equal stages."""
    check_layers(len(getattr(model.base_model, plan_of(model).layers)), count)


def cut(model: Any, indices: list[int], count: int) -> list[Stage]:
    """Return the stages of these numbers among `count` equal ones, and leave the model with their modules only.

    Names of parameters stay what they are in the whole model.
    """
    plan, base = plan_of(model), model.base_model
    each = len(getattr(base, plan.layers)) // count
    made = [_piece(model, plan, index, each, count) for index in indices]
    kept = {number for index in indices for number in range(index * each, (index + 1) * each)}
    _leave(base, plan, kept, 0 in indices, count - 1 in indices)
    if count - 1 not in indices:
        model.set_output_embeddings(nn.Identity())
    return made


def _piece(model: Any, plan: LayerPlan, index: int, each: int, count: int) -> Stage:
    """Return one stage, on the modules of the model that it shares."""
    first, last = index == 0, index == count - 1
    shell = _shell(model)
    base = _shell(model.base_model)
    setattr(shell, model.base_model_prefix, base)
    _leave(base, plan, set(range(index * each, (index + 1) * each)), first, last)
    if not last:
        shell.set_output_embeddings(nn.Identity())
    return Stage(shell, first, last)


def _leave(base: Any, plan: LayerPlan, kept: set[int], first: bool, last: bool) -> None:
    """Leave the base model these layers only."""
    layers = getattr(base, plan.layers)
    setattr(base, plan.layers, nn.ModuleList(layer if at in kept else Same() for at, layer in enumerate(layers)))
    for names, mine in ((plan.before, first), (plan.behind, last)):
        for name in names:
            if not mine:
                setattr(base, name, Nothing() if isinstance(getattr(base, name), nn.Embedding) else Same())


def _shell(module: Any) -> Any:
    """Return a module with the same parts, of which some may be replaced."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
