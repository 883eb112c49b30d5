"""The loss of a language model in chunks of tokens: the logits of a batch are never whole in memory.

Whole logits take 12 bytes x vocabulary x tokens at the start of the backward pass, often more than anything else. Here the
output embedding returns the loss in their place, and has made its gradients by then: nothing is computed twice.
`torch.nn.functional.linear_cross_entropy` does the same, but gives the loss in the type of its input: in bfloat16 it has
three digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from . import model as models
from .labels import IGNORED

# Whose logits are what the output embedding returns, unchanged.
FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "olmo", "olmo2", "gpt2", "gpt_neox"}
LOGITS = 1 << 25  # of a chunk at most


def of(model: Any, tensor: int = 1) -> ChunkedLoss | None:
    """Return what makes the loss of a model in chunks; None where its logits have to be whole: of a family that does
    more to them, compiled, or split over so many tensor parallel ranks."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in FAMILIES or tensor > 1 or model._compiled_call_impl is not None:
        return None
    head = model.get_output_embeddings()
    return ChunkedLoss(head) if type(head) is torch.nn.Linear and head.bias is None else None


class ChunkedLoss:
    """Stands before the forward pass of an output embedding; without a loss to be made that is what it was."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head, self._logits = head, head.forward
        self._goal: torch.Tensor | None = None
        self._summed = False
        head.forward = self._forward  # type: ignore[method-assign]

    def losses(self, model: Any, batch: dict[str, torch.Tensor], summed: bool) -> torch.Tensor:
        """Return the loss of each sample, (B,), or with a gradient that of all together, (1,)."""
        self._goal, self._summed = models.targets(batch["labels"]), summed
        try:
            each: torch.Tensor = model(**models.inputs(batch)).logits
        finally:
            self._goal = None
        return each if summed else each.view(len(batch["labels"]), -1).sum(1)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._goal is None:
            return self._logits(hidden)
        missing = hidden.shape[1] - self._goal.shape[1]  # what stands at t says t + 1: the last one says nothing
        goal = functional.pad(self._goal, (0, missing), value=IGNORED).flatten()
        flat, weight, kind = hidden.flatten(0, 1), self._head.weight, hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        torch.clear_autocast_cache()  # its copies of the layers' weights would stay until the loss is there
        with torch.autocast(kind, enabled=False):
            if self._summed:
                return SummedLoss.apply(flat, weight, goal, dtype)  # type: ignore[no-any-return, no-untyped-call]
            return chunks(flat, weight.to(dtype), goal)


class SummedLoss(torch.autograd.Function):
    """The loss of all tokens; its gradients are made on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, goal: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad
        ctx.hidden = torch.empty_like(hidden) if wanted[0] else None
        ctx.weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        total = chunks(hidden, weight.to(dtype), goal, ctx.hidden, ctx.weight).sum(0, keepdim=True)
        if ctx.weight is not None:
            ctx.weight = ctx.weight.to(weight.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        both = [None if each is None else each.mul_(gradients[0]) for each in (ctx.hidden, ctx.weight)]
        ctx.hidden = ctx.weight = None
        return (*both, None, None)


def chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    goal: torch.Tensor,
    hidden_grad: torch.Tensor | None = None,
    weight_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss of each token in float32: (N,).

    Args:
        hidden: what the tokens are said from, (N, H).
        weight: the output embedding, (V, H), in the type in which it is multiplied.
        goal: the tokens to be said, (N,); ignored ones have the loss 0.
        hidden_grad: (N, H), overwritten with the gradient of the losses' sum.
        weight_grad: (V, H) in float32, to which that of the weight is added.
    """
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    counts, known = goal != IGNORED, goal.clamp(min=0)[:, None]
    size = max(1, LOGITS // len(weight))
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        mine = hidden[part].to(weight.dtype)
        logits = functional.linear(mine, weight).float()
        logits.sub_(logits.amax(1, keepdim=True))  # in place, here and below: the logits are the largest tensor
        said = logits.gather(1, known[part])
        total = logits.exp_().sum(1, keepdim=True)
        losses[part] = ((total.log() - said) * counts[part, None]).squeeze(1)
        if hidden_grad is None and weight_grad is None:
            continue
        logits.div_(total).scatter_add_(1, known[part], torch.full_like(total, -1.0)).mul_(counts[part, None])
        gradient = logits.to(weight.dtype)
        del logits
        if hidden_grad is not None:
            hidden_grad[part] = gradient @ weight
        if weight_grad is not None:
            weight_grad += gradient.T @ mine
        del gradient
    return losses
