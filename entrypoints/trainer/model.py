"""Build models (pretrained or from scratch), their optimizer, learning rate schedule and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from . import collectives, pretrained
from .errors import Unsupported, describe_missing
from .labels import IGNORED, counted, targets
from .pretrained import Whole
from .weights import Recorder, Weights, fill

if TYPE_CHECKING:
    from .arguments import Arguments

GATED = {"llama", "qwen2", "qwen3", "mistral", "gemma", "phi3"}  # three matrices in the feed-forward part, not two


def build(arguments: Arguments, tokenizer: Any, labels: list[str]) -> torch.nn.Module:
    """Return the model on the CPU, in the arguments' data type; raises Unsupported when it cannot be loaded or built."""
    model = outline(arguments, tokenizer, labels)
    fill(model, torch.device("cpu"))
    return model


def outline(arguments: Arguments, tokenizer: Any, labels: list[str]) -> torch.nn.Module:
    """Return the model without values, which `weights.fill` gives each rank its part of.

    A model that cannot be loaded or drawn tensor by tensor comes whole, and a line says why. Raises Unsupported when it
    cannot be loaded or built at all.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any = AutoModelForCausalLM if arguments.writes else AutoModelForSequenceClassification
    names: dict[str, Any] = {}
    if labels:
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
        names["num_labels"] = len(labels)
    common = {"attn_implementation": arguments.attn_implementation, "dtype": getattr(torch, arguments.dtype)}
    try:
        try:
            return _outlined(arguments, tokenizer, auto, names, common)
        except Whole as reason:
            if collectives.rank() == 0:
                print(f"each rank builds the whole model before it is sharded: {reason}", flush=True)
        if arguments.model:
            model = auto.from_pretrained(arguments.model, ignore_mismatched_sizes=bool(labels), **common, **names)
        else:
            model = auto.from_config(_config(arguments, tokenizer, names), **common)
        return _adjusted(model, arguments, tokenizer)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        model_name = arguments.model or f"of type {arguments.model_type}"
        raise Unsupported(f"the model {model_name} cannot be created: {describe_missing(model_name, error)}") from None


def _outlined(
    arguments: Arguments, tokenizer: Any, auto: Any, names: dict[str, Any], common: dict[str, Any]
) -> torch.nn.Module:
    """Return the model without values; raises Whole where it must be built with them."""
    recorder, stored = Recorder(), dict[int, Any]()
    if arguments.model:
        files = pretrained.find(arguments.model)
        config = pretrained.config(arguments.model, names)
    else:
        config = _config(arguments, tokenizer, names)
    with recorder.recording():
        model = auto.from_config(config, **common)
    if arguments.dtype != "float32" and getattr(model, "_keep_in_fp32_modules_strict", None):
        raise Whole(f"transformers keeps some of its layers in float32 with dtype {arguments.dtype}")
    if arguments.model:
        stored = files.match(model, mismatched=bool(names))
        pretrained.add_generation_config(model, arguments.model)
    with recorder.recording():
        model = _adjusted(model, arguments, tokenizer)
    weights = Weights.of(model, recorder, arguments.seed, stored)
    if weights.unknown:
        raise Whole(f"cloudtrain does not know how {weights.unknown[0]} is initialised")
    model.initial_weights = weights
    return model  # type: ignore[no-any-return]


def _adjusted(model: Any, arguments: Arguments, tokenizer: Any) -> Any:
    """Return the model as it is trained."""
    if arguments.writes and (need := len(tokenizer)) > (has := model.get_input_embeddings().num_embeddings):
        raise Unsupported(
            f"the tokenizer has {need} tokens, and the model {arguments.model} has only {has} embeddings:"
            " use the model's own tokenizer (remove the hyperparameter tokenizer)"
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False  # of no use in training
    if arguments.gradient_checkpointing:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:  # its name before transformers 5
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if arguments.use_peft:
        from . import lora

        model = lora.adapted(model, arguments)
    return model


def compiled(model: torch.nn.Module, arguments: Arguments) -> None:
    """Let the model be compiled at its first call; in place, so that its parameters keep their names."""
    if arguments.torch_compile:
        model.compile(backend=arguments.torch_compile_backend, mode=arguments.torch_compile_mode or None)


def plain(model: Any) -> Any:
    """Return the trained model as it is saved: not compiled any more."""
    model._compiled_call_impl = None
    if hasattr(model, "config"):
        model.config.use_cache = True
    return model


def graphs() -> int:
    """Return how many graphs were compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _config(arguments: Arguments, tokenizer: Any, names: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    width, heads = arguments.hidden_size, arguments.num_attention_heads
    if width % heads:
        raise Unsupported(f"--hidden_size {width} is not a multiple of --num_attention_heads {heads}")
    inner = arguments.intermediate_size
    if inner < 0:
        inner = 64 * round(width * 8 / 3 / 64) if arguments.model_type in GATED else 4 * width
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "num_hidden_layers": arguments.num_hidden_layers,
        "num_attention_heads": heads,
        "max_position_embeddings": arguments.block_size,
        "tie_word_embeddings": arguments.tie_word_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if arguments.model_type == "gpt2":
        sizes["n_inner"] = inner
    else:
        sizes["intermediate_size"] = max(inner, 64)
        sizes["num_key_value_heads"] = arguments.num_key_value_heads if arguments.num_key_value_heads > 0 else heads
    config = AutoConfig.for_model(arguments.model_type, **sizes, **names)
    if arguments.dropout >= 0:
        for name, value in list(config.to_dict().items()):
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float | int):
                setattr(config, name, arguments.dropout)
    return config


def inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the model is called with: its labels stay outside, the loss is ours."""
    return {name: value for name, value in batch.items() if name != "labels"}


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample, summed over its tokens: (B,). Ignored labels count nothing."""
    goal = targets(labels)
    if labels.dim() == 2:
        logits = logits[:, : goal.shape[1]]  # (B, T - 1, V): what stands at t says t + 1
    each = functional.cross_entropy(
        logits.float().flatten(0, -2), goal.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return each.view(len(labels), -1).sum(1)


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return how many labels of each sample are the likeliest guess: (B,)."""
    goal = targets(labels)
    guess = (logits[:, : goal.shape[1]] if labels.dim() == 2 else logits).argmax(-1)
    return (guess == goal).view(len(labels), -1).sum(1)


def scored(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return (loss, labels that count, right ones) of each sample: (B, 3)."""
    right = hits(logits, labels)
    return torch.stack([losses(logits, labels), counted(labels), right], dim=1).double()


def length(batch: dict[str, torch.Tensor]) -> torch.Tensor | int:
    """Return the tokens of a batch, padding excepted; the host does not wait for them."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else mask.sum()


def pairs(batch: dict[str, torch.Tensor]) -> torch.Tensor | int:
    """Return each sample's tokens with each, padding excepted; the host does not wait for them."""
    mask = batch.get("attention_mask")
    if mask is None:
        samples, tokens = batch["input_ids"].shape
        return samples * tokens**2
    return mask.sum(1).double().square().sum()


def parameter_groups(model: torch.nn.Module, arguments: Arguments) -> list[dict[str, Any]]:
    """Return what is trained in two groups: biases and norms are not decayed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {
            "params": [parameter for parameter in trained if parameter.dim() >= 2],
        },
        {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def optimizer(
    model: torch.nn.Module, arguments: Arguments, groups: list[dict[str, Any]] | None = None
) -> torch.optim.Optimizer:
    """Return AdamW, in one kernel or step by step, of the model's parameter groups or of others."""
    groups = groups or parameter_groups(model, arguments)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=arguments.optim == "adamw_torch_fused",
    )


def schedule(optimizer: torch.optim.Optimizer, arguments: Arguments, total_steps: int) -> Any:
    """Return the learning rate's schedule over optimiser steps."""
    from transformers.optimization import get_scheduler

    warmup = arguments.warmup_steps or arguments.warmup_ratio
    steps = round(warmup * total_steps) if warmup < 1 else int(warmup)
    return get_scheduler(arguments.lr_scheduler_type, optimizer, num_warmup_steps=steps, num_training_steps=total_steps)
