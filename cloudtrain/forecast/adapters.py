"""What is not trained whole: LoRA adapters, quantised weights; and what optimizers keep of what is trained.

Module names are those of transformers 5.23, default targets those of peft 0.21
(src/peft/utils/constants.py). tests/forecast/test_adapters.py counts each family with peft on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.forecast.models import Shape

ALL = "all-linear"
# Linear modules of a layer: name, width that comes in, width that goes out; x is q and k and v together, g twice f.
_ATTENTION = "q_proj h q, k_proj h k, v_proj h k, o_proj q h"
_GATED = f"{_ATTENTION}, gate_proj h f, up_proj h f, down_proj f h"
_FUSED = "query_key_value h x, dense q h, dense_h_to_4h h f, dense_4h_to_h f h"
_T5 = "q h q, k h k, v h k, o q h"
_BERT = "query h q, key h k, value h k, attention.output.dense q h, intermediate.dense h f, output.dense f h"
_MODULES: Mapping[str, str] = {
    "phi3": "qkv_proj h x, o_proj q h, gate_up_proj h g, down_proj f h",
    "phi": "q_proj h q, k_proj h k, v_proj h k, dense q h, fc1 h f, fc2 f h",
    "gpt2": "c_attn h x, attn.c_proj q h, c_fc h f, mlp.c_proj f h",
    "distilbert": "q_lin h q, k_lin h k, v_lin h k, out_lin q h, lin1 h f, lin2 f h",
    "t5": ", ".join(3 * [_T5] + 2 * ["wi h f, wo f h"]),
    "t5_gated": ", ".join(3 * [_T5] + 2 * ["wi_0 h f, wi_1 h f, wo f h"]),
    "vit": f"{_ATTENTION}, fc1 h f, fc2 f h",
    **dict.fromkeys(("gpt_neox", "falcon", "falcon_new", "bloom"), _FUSED),
    **dict.fromkeys(("bert", "roberta"), _BERT),
}
_DEFAULT: Mapping[str, tuple[str, ...]] = {
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "gpt2": ("c_attn",),
    **dict.fromkeys(("gpt_neox", "falcon", "falcon_new", "bloom"), ("query_key_value",)),
    **dict.fromkeys(("t5", "t5_gated"), ("q", "v")),
    **dict.fromkeys(("bert", "roberta"), ("query", "value")),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "stablelm"), ("q_proj", "v_proj")
    ),
}
# Bytes of a quantised parameter. bitsandbytes 0.50 (functional.py): a constant in float32 for 64 numbers of NF4, itself
# kept in one byte with a constant for 256 of them (double quantisation, 0.127 bits in the QLoRA paper, arXiv 2305.14314).
BITS = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}
OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "muon", "sgd")


def targets(shape: Shape, named: tuple[str, ...]) -> Iterator[tuple[str, int, int]]:
    """Yield name, input and output width of the modules of a layer that have an adapter.

    Args:
        shape: the model.
        named: names of modules, all-linear, or none for peft's default; all of them where peft has none.
    """
    named = named or _DEFAULT.get(shape.family, (ALL,))
    widths = {"h": shape.hidden, "q": shape.queries, "k": shape.keys, "f": shape.inner, "g": 2 * shape.inner,
              "x": shape.queries + 2 * shape.keys}  # fmt: skip
    text = _MODULES.get(shape.family, _ATTENTION if shape.experts else _GATED)
    for name, inputs, outputs in (each.split() for each in text.split(", ")):
        if ALL in named or any(name == each or name.endswith(f".{each}") for each in named):
            yield name, widths[inputs], widths[outputs]


def parameters(shape: Shape, rank: int, named: tuple[str, ...]) -> int:
    """Return the parameters of an adapter in all layers."""
    return shape.layers * rank * sum(inputs + outputs for _, inputs, outputs in targets(shape, named))


def moments(shape: Shape, count: float, learned: float, optimizer: str, adapter: float) -> float:
    """Return the bytes that an optimizer keeps of all that is trained.

    Args:
        shape: the model.
        count: parameters that are trained.
        learned: their bytes.
        optimizer: one of OPTIMIZERS.
        adapter: rows and columns of what is trained as far as it is an adapter; 0: the whole model is trained.
    """
    if optimizer == "adamw-8bit":  # two states of a byte, and of each a constant in float32 for 256 of them
        return 2 * count * (1 + 4 / 256)
    if optimizer == "adafactor":  # sums of rows and columns, and vectors
        whole = sum(inputs + outputs for _, inputs, outputs in targets(shape, (ALL,))) * max(1, shape.experts)
        heads = 1 if shape.tied else 2
        vectors = shape.parameters - shape.layers * shape.layer_matrices - heads * shape.embedding
        return 4 * (adapter or shape.layers * whole + heads * (shape.vocabulary + shape.hidden) + vectors)
    if optimizer == "muon" and not adapter:  # one moment of the layers' matrices, AdamW's two of all else
        return 2 * learned - learned / count * shape.layers * shape.layer_matrices
    return {"sgd": 0, "muon": 1}.get(optimizer, 2) * learned
