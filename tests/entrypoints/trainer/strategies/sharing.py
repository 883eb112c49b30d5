"""What test_context.py lets ranks do: families of models over sequences in parts and whole ones; rank 0 prints what it found."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from trainer import model as models
from trainer.data.samples import padded
from trainer.errors import Unsupported
from trainer.labels import IGNORED
from trainer.strategies import context_parallel
from trainer.strategies.mesh import ParallelismPlan
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen2, a window in one layer": {
        **GROUPED,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral, a window": {**GROUPED, "sliding_window": 6},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 5},
    "phi3": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "olmo2": GROUPED,
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},  # refused: some layers are convolutions
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt2, recomputed": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


ROPES = {
    "llama, dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    "phi3, longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    },
}


def made(name: str):
    torch.manual_seed(3)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    more = dict(FAMILIES.get(name, GROUPED), **({"rope_parameters": ROPES[name]} if name in ROPES else {}))
    config = AutoConfig.for_model(name.partition(",")[0], **SIZES, **special, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.config.use_cache = False
    if name.endswith("recomputed"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():  # larger than families begin with: attention is to matter
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def rows(*lengths: int) -> dict[str, torch.Tensor]:
    """Return a batch of conversations, say: filled up on the right, some tokens not to be learned."""
    draw = torch.Generator().manual_seed(11)
    items = []
    for length in lengths:
        ids = torch.randint(3, SIZES["vocab_size"], (length,), generator=draw)
        learned = torch.rand(length, generator=draw) < 0.7
        items.append({"input_ids": ids, "labels": torch.where(learned, ids, IGNORED)})
    return padded(items, pad=0)


def gradients(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def compared(name: str, place: context_parallel.ContextParallel, batch: dict[str, torch.Tensor]) -> dict:
    """Return how far loss and gradients, summed over the parts, are from those of whole sequences."""
    model = made(name)
    whole = models.losses(model(**models.inputs(batch)).logits, batch["labels"])
    whole.sum().backward()
    expected = gradients(model)
    model.zero_grad()
    place.put_on(model)
    place.check(torch.device("cpu"))
    part = place.part(batch)
    loss = models.losses(model(**models.inputs(part)).logits, part["labels"])
    loss.sum().backward()
    found, summed = gradients(model), loss.detach().clone()
    alone = float((found - expected).norm() / expected.norm())
    dist.all_reduce(found)
    dist.all_reduce(summed)
    place.take_off()
    again = models.losses(model(**models.inputs(batch)).logits, batch["labels"])
    return {
        "loss": float((summed - whole).abs().max() / whole.max()),
        "gradients": float((found - expected).norm() / expected.norm()),
        "alone": alone,
        "seen": place.seen,
        "recomputed": name.endswith("recomputed") and any(isinstance(each, GPT2Block) for each in model.modules()),
        "own again": bool((again == whole).all()),
    }


def kept(model, inputs: dict[str, torch.Tensor]) -> int:
    """Return the bytes that a forward pass keeps for the way back, parameters excepted."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs).logits.sum()
    return sum(found.values())


def memory(place: context_parallel.ContextParallel) -> dict[str, int]:
    """Return what is kept of whole sequences, and what of parts."""
    model, batch = made("llama, long"), rows(32, 32)
    whole = kept(model, models.inputs(batch))
    place.put_on(model)
    parts = kept(model, models.inputs(place.part(batch)))
    place.take_off()
    return {"whole": whole, "parts": parts}


def refusal(place: context_parallel.ContextParallel, name: str) -> str:
    """Return the sentence with which a model is refused."""
    model = made(name)
    place.put_on(model)
    try:
        place.check(torch.device("cpu"))
    except Unsupported as error:
        return str(error)
    finally:
        place.take_off()
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    place = context_parallel.of(ParallelismPlan("ddp", context=dist.get_world_size()), dist.get_rank())
    assert place is not None
    blocks = rows(24, 24, 24)
    found = {name: compared(name, place, blocks) for name in FAMILIES if name != "lfm2"}
    found["lengths of their own"] = compared("llama", place, rows(19, 7, 23))
    found["a table of positions that ends"] = compared("gpt2", place, rows(31, 30))
    unknown = {name: refusal(place, name) for name in ("lfm2", "bert", *ROPES)}
    context_parallel.FAMILIES |= {"lfm2", "bert"}
    exit_when_unsupported = {name: refusal(place, name) for name in ("lfm2", "bert")}

    real = context_parallel.visible
    context_parallel.visible = lambda begin, end, window, device: torch.ones_like(real(begin, end, window, device))
    exit_when_unsupported["no mask"] = refusal(place, "llama")
    context_parallel.visible, order = real, context_parallel.in_order
    context_parallel.in_order = lambda parts: order(parts.flip(0))
    exit_when_unsupported["another order"] = refusal(place, "llama")
    context_parallel.in_order = order
    assert refusal(place, "llama") == ""
    print(
        "FOUND",
        json.dumps({"cases": found, "unknown": unknown, "refusals": exit_when_unsupported, "kept": memory(place)}),
        flush=True,
    )
    dist.barrier()


if __name__ == "__main__":
    main()
