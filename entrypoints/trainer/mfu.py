"""Model FLOPs utilization (MFU): model FLOP/s over the peak of the GPUs' data sheets (peaks.py).

A token costs two operations for each parameter that a matrix product reads, forward, and twice that backward: 6 N, and 4 N
where the parameters are frozen, as below an adapter: their gradients are not needed. Embeddings are looked up and count
nothing, the language model's head counts, also where both are one matrix. Attention adds 12 L H Q for each pair of tokens of
a sample (L layers, H heads, Q their width), so 12 L H Q T a token, the upper half of a causal mask included. What is
computed again to save memory counts nothing: it is no progress.

So it is reckoned in Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, appendix B
(https://arxiv.org/abs/2204.02311), after Kaplan et al., Scaling Laws for Neural Language Models, section 2.1
(https://arxiv.org/abs/2001.08361). tests/entrypoints/trainer/test_mfu.py holds it against torch's own count of operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from . import collectives
from .peaks import peak

# Of which the formula was held against a count: experts, windows, state spaces and encoders before decoders cost otherwise.
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox", "opt", "bert", "roberta", "distilbert"}


def kind(mixed_precision: str, dtype: str = "float32") -> str:
    """Return the kind of number that matrix products take, with weights of a data type."""
    if mixed_precision == "no":
        mixed_precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "no")
    if mixed_precision in ("bf16", "fp16"):
        return mixed_precision
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


class Work(NamedTuple):
    """FLOPs of training: of each token, and of each pair of tokens of one sample."""

    token: float
    pair: float


def work(model: nn.Module, longest: int) -> Work | None:
    """Return what a model costs whose samples have so many tokens at the most; None where the formula does not hold."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    if config.model_type not in FAMILIES or (window and window < longest):
        return None
    operations = 0
    for name, module in model.named_modules():
        # peft keeps the first version of what it trains as a whole; nothing goes through that
        if isinstance(module, nn.Embedding) or "original_module" in name.split("."):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 2:
                operations += parameter.numel() * (6 if parameter.requires_grad else 4)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Work(operations, 12 * config.num_hidden_layers * config.num_attention_heads * width)


@dataclass(frozen=True)
class Use:
    """What the model costs, and what all ranks' GPUs promise together."""

    work: Work
    peak: float

    def share(self, tokens: float, pairs: float, seconds: float) -> float:
        """Return the share of the peak that was made use of while so much was trained."""
        return (self.work.token * tokens + self.work.pair * pairs) / (self.peak * max(seconds, 1e-9))


def use(done: Work | None, device: torch.device, mixed_precision: str, dtype: str = "float32") -> Use | None:
    """Return what MFU is computed from, None where the model or any rank's GPU is not known; collective on GPUs."""
    if device.type != "cuda":
        return None
    promised = collectives.every_rank(peak(torch.cuda.get_device_name(device), kind(mixed_precision, dtype)))
    if done is None or not all(promised):
        return None
    return Use(done, sum(filter(None, promised)))
