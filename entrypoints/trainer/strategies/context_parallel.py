"""Context parallelism: sequences sharded over ranks, with attention over all shards.

A sequence is cut into twice as many chunks as there are ranks; rank r has the chunks r and, from the end, r:

    4 ranks     0 1 2 3 3 2 1 0

Later tokens look at more: so all ranks have the same work. Everything but attention is done token by token. For attention
the keys and values of a layer are gathered from all ranks, and each rank's queries look at them (the way in which Llama 3
was trained, no ring). They are whole on every rank while a layer is computed: backwards they are gathered and looked at
again, so that all that is kept in between is a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .. import collectives
from ..errors import Unsupported
from ..labels import IGNORED

if TYPE_CHECKING:
    from .mesh import ParallelismPlan

NAME = "cloudtrain_context"  # of the attention, among those that transformers knows
# Whose attention was compared with that over whole sequences (sharing.py of the tests). Others may keep a window or
# chunks in a mask, which no part has, or pass tokens on by convolutions and states.
FAMILIES = {"llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma3_text", "phi3", "olmo2", "gpt2"}
BY_LENGTH = ("dynamic", "longrope")  # turn positions by the length of what they see: that of a part is another one
CLOSE, CLOSE_16 = 1e-3, 0.1  # how far the logits of parts may be from those of whole sequences, of the largest one


def of(plan: ParallelismPlan, rank: int) -> ContextParallel | None:
    """Return a rank's place, None where no sequence is shared; collective."""
    if plan.context == 1:
        return None
    mine = None
    for first in range(plan.world):
        if plan.context_rank(first) == 0:
            ranks = [first + position * plan.tensor for position in range(plan.context)]
            group = dist.new_group(ranks)
            mine = group if rank in ranks else mine
    return ContextParallel(plan.context, plan.context_rank(rank), mine)


def check_family(config: Any, size: int) -> None:
    """Raise Unsupported for a model whose sequences are not split over so many ranks, as its configuration says."""
    if config.model_type not in FAMILIES:
        families = ", ".join(sorted(FAMILIES))
        raise Unsupported(f"cp_size {size}: {config.model_type} is not supported; supported models: {families}")
    if kind := rope(getattr(config, "rope_parameters", None)):
        raise Unsupported(
            f"cp_size {size}: positions of the type {kind} depend on the sequence length, "
            "so the sequence cannot be split"
        )
    longest = getattr(config, "max_position_embeddings", None) or 2 * size
    if 2 * size > longest:
        raise Unsupported(
            f"cp_size {size} splits each sequence into {2 * size} chunks, and the model's sequences have at most "
            f"{longest} tokens: set cp_size to {longest // 2} or less, or use a model with longer sequences"
        )


class ContextParallel:
    """A rank's place among those that share its sequences, which are the group."""

    def __init__(self, size: int, position: int, group: Any = None) -> None:
        self.size, self.group = size, group
        self.chunks = (position, 2 * size - 1 - position)
        self.seen: dict[str, int] = {}  # by the newest attention
        self._model: Any = None
        self._own = ""  # the model's attention
        self._kept = True  # whether attention is to be computed again on the way back

    # -- the model ----------------------------------------------------------------------------------------------------

    def put_on(self, model: Any) -> None:
        """Let the model's attention look at all ranks' tokens."""
        from transformers import AttentionInterface

        self._model, self._own = model, model.config._attn_implementation
        self._kept = not model.is_activation_checkpointing  # else the layer as a whole is computed again
        AttentionInterface.register(NAME, self.attend)
        model.set_attn_implementation(NAME)

    def take_off(self) -> None:
        """Give the model its own attention back, which needs no other rank."""
        self._model.set_attn_implementation(self._own)

    def check(self, device: torch.device, precision: str = "no") -> None:
        """Raise Unsupported unless the model is of a family that was compared, and says of a short sequence in parts what it
        says of a whole one. Collective."""
        model, config = self._model, self._model.config.get_text_config()
        check_family(config, self.size)
        length = min(8 * self.size, getattr(config, "max_position_embeddings", None) or 8 * self.size)
        ids = torch.arange(length, device=device)[None] % config.vocab_size
        part = self.part({"input_ids": ids, "labels": ids})
        mine = self.positions(length + -length % (2 * self.size), device)
        training = model.training
        model.eval()
        with torch.no_grad():
            parts = model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
            self.take_off()
            whole = model(input_ids=ids).logits
            model.set_attn_implementation(NAME)
        model.train(training)
        apart = (parts[:, mine < length] - whole[:, mine[mine < length]]).abs().max() / whole.abs().max()
        differences = collectives.every_rank(float(apart))
        exact = precision == "no" and whole.dtype == torch.float32
        if not all(difference < (CLOSE if exact else CLOSE_16) for difference in differences):
            raise Unsupported(
                f"cp_size {self.size}: {config.model_type} gives other results for a split sequence than for a whole one"
                "; remove cp_size, or write strategy: fsdp"
            )

    # -- the parts ----------------------------------------------------------------------------------------------------

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return where this rank's tokens stand in sequences of a length that can be cut."""
        chunk = length // (2 * self.size)
        first, last = (torch.arange(number * chunk, (number + 1) * chunk, device=device) for number in self.chunks)
        return torch.cat((first, last))

    def part(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's part of every sequence. Its labels have one in front, of nothing: what stands at t + 1 is
        what the token at t is to say, though that one may be another rank's.

        Padding is on the right, where no token looks: neither ours, up to a length that can be cut, nor the batch's own
        needs a mask.
        """
        if strange := sorted(batch.keys() - {"input_ids", "labels", "attention_mask"}):
            raise Unsupported(
                f"cp_size {self.size}: the batches have {strange[0]}, which cannot be split along with the tokens"
            )
        ids, labels = batch["input_ids"], batch["labels"]
        length = ids.shape[1]
        missing = -length % (2 * self.size)
        mine = self.positions(length + missing, ids.device)
        goals = functional.pad(labels[:, 1:], (0, 1 + missing), value=IGNORED)[:, mine]
        return {
            "input_ids": functional.pad(ids, (0, missing))[:, mine],
            "position_ids": mine.clamp(max=length - 1).expand(len(ids), -1),  # a table of positions may end there
            "labels": functional.pad(goals, (1, 0), value=IGNORED),
        }

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # (B, H, T / ranks, D), keys and values of fewer heads perhaps
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return what this rank's tokens see, as transformers wants it of an attention: (B, T / ranks, H, D). Collective."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if attention_mask is not None:
            raise Unsupported(
                f"cp_size {self.size}: the model creates its own attention mask, which cannot be split; remove it"
            )

        def look(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            both = in_order(Gathered.apply(torch.cat((key, value), dim=-1), self.group))
            keys, values = both.split((key.shape[-1], value.shape[-1]), dim=-1)
            chunk = query.shape[2] // 2
            self.seen = {"tokens": query.shape[2], "keys": keys.shape[2]}
            outputs = []
            for queries, number in zip(query.split(chunk, dim=2), self.chunks, strict=True):
                end = (number + 1) * chunk  # what comes later is not looked at
                mask = visible(number * chunk, end, sliding_window, query.device)
                before = (each[:, :, :end] for each in (keys, values))
                outputs.append(sdpa_attention_forward(module, queries, *before, mask, **options)[0])
            return torch.cat(outputs, dim=1)

        if self._kept and torch.is_grad_enabled():
            return checkpoint(look, query, key, value, use_reentrant=False), None
        return look(query, key, value), None


def rope(parameters: Any) -> str:
    """Return the type of position that depends on a sequence's length, among a model's or its layers'; "" for none."""
    if not isinstance(parameters, dict):
        return ""
    named = [parameters.get("rope_type"), *(rope(each) for each in parameters.values())]
    return next((str(name) for name in named if name and any(part in str(name) for part in BY_LENGTH)), "")


def visible(begin: int, end: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which of the first `end` tokens those from `begin` on see: (1, 1, end - begin, end)."""
    back = torch.arange(begin, end, device=device)[:, None] - torch.arange(end, device=device)[None, :]
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    return seen[None, None]


class Gathered(torch.autograd.Function):
    """The parts of all ranks, one after the other in front: (ranks, B, H, T / ranks, D). Backwards each rank gets the sum
    of what all of them say of its part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = part.new_empty(dist.get_world_size(group), *part.shape)
        dist.all_gather_single(parts.flatten(0, 1), part.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = gradients[0].contiguous()
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter_single(mine, parts.flatten(0, 1), group=ctx.group)
        return mine, None


def in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the ranks' parts (ranks, B, H, T / ranks, D) as sequences: (B, H, T, D)."""
    first, last = parts.chunk(2, dim=3)
    return torch.cat((first, last.flip(0))).movedim(0, 2).flatten(2, 3)
