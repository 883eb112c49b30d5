"""Model FLOPs utilization (MFU): model FLOP/s over the peak of the GPUs' data sheets.

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

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from . import collectives


class Peak(NamedTuple):
    """A GPU's dense TFLOP/s by kind of number, None for what it cannot do; tensor cores with sums in float32."""

    name: str  # of torch.cuda.get_device_name, the whole of it, "NVIDIA " aside: a slice (MIG) or a relative is not it
    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_SHEETS = "https://www.nvidia.com/content/dam/en-zz/Solutions/"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
# By the data sheet that has them. Where one gives tensor cores with sparsity only, it is halved here. The sheets themselves
# could not be opened from where this was written: the figures are those that public pages and code cite from these
# addresses, most of them compared with each other on 2026-11-22; those of V100, T4, the GeForce cards, the NVL ones and B200's
# tf32 rest on fewer such pages.
SOURCES: dict[str, list[Peak]] = {
    _SHEETS + "Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf": [
        Peak("A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", 312, 312, 156, 19.5),
    ],
    _NVIDIA + "h100/": [
        Peak("H100 80GB HBM3", 989.4, 989.4, 494.7, 66.9),  # SXM
        Peak("H100 NVL", 835.5, 835.5, 417.5, 60),
    ],
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet": [
        Peak("H100 PCIe", 756, 756, 378, 51.2),
    ],
    _NVIDIA + "h200/": [
        Peak("H200", 989.4, 989.4, 494.7, 66.9),
        Peak("H200 NVL", 835.5, 835.5, 417.5, 60),
    ],
    _NVIDIA + "hgx/": [Peak("B200", 2250, 2250, 1125, 75)],
    _NVIDIA + "l4/": [Peak("L4", 121, 121, 60, 30.3)],
    "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413": [Peak("L40S", 362.05, 362.05, 183, 91.6)],
    "https://images.nvidia.cn/content/Solutions/data-center/vgpu-L40-datasheet.pdf": [
        Peak("L40", 181.05, 181.05, 90.5, 90.5),
    ],
    _SHEETS + "Data-Center/a10/pdf/a10-datasheet.pdf": [Peak("A10", 125, 125, 62.5, 31.2)],
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf": [
        Peak("A10G", 70, 70, 35, 35),
    ],
    "https://images.nvidia.cn/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf": [
        Peak("A40", 149.7, 149.7, 74.8, 37.4),
    ],
    _SHEETS + "Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf": [Peak("(Tesla )?T4", None, 65, None, 8.1)],
    _VOLTA: [
        Peak("(Tesla )?V100-SXM2-(16|32)GB", None, 125, None, 15.7),
        Peak("(Tesla )?V100-PCIE-(16|32)GB", None, 112, None, 14),
        Peak("(Tesla )?V100S-PCIE-32GB", None, 130, None, 16.4),
    ],
    _ADA: [Peak("GeForce RTX 4090", 165.2, 165.2, 82.6, 82.6)],
    _AMPERE: [
        Peak("GeForce RTX 3090", 71, 71, 35.6, 35.6),
        Peak("RTX A6000", 154.8, 154.8, 77.4, 38.7),
    ],
}
# Of which the formula was held against a count: experts, windows, state spaces and encoders before decoders cost otherwise.
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox", "opt", "bert", "roberta", "distilbert"}


def peak(device: str, kind: str) -> float | None:
    """Return the FLOP/s that a GPU of that name promises for bf16, fp16, tf32 or fp32; None for one that is not known."""
    name = device.removeprefix("NVIDIA ")
    row_of_gpu = next((row for rows in SOURCES.values() for row in rows if re.fullmatch(row.name, name)), None)
    if row_of_gpu is None:
        return None
    if kind == "tf32" and row_of_gpu.tf32 is None:
        kind = "fp32"  # asked for, and replaced by fp32 without a warning
    promised: float | None = getattr(row_of_gpu, kind)
    return promised and promised * 1e12


def kind(mixed_precision: str) -> str:
    """Return the kind of number that matrix products take."""
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


def use(done: Work | None, device: torch.device, mixed_precision: str) -> Use | None:
    """Return what MFU is computed from, None where the model or any rank's GPU is not known; collective on GPUs."""
    if device.type != "cuda":
        return None
    promised = collectives.every_rank(peak(torch.cuda.get_device_name(device), kind(mixed_precision)))
    if done is None or not all(promised):
        return None
    return Use(done, sum(filter(None, promised)))
