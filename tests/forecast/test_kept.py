"""What a layer keeps for the backward pass, against what torch saves of transformers' own layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from cloudtrain.forecast import memory, models

pytestmark = pytest.mark.train
BATCH, LENGTH = 2, 64  # an image of 63 patches is one, so its length is another
WIDTHS = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "vocab_size": 512}
T5 = {"d_model": 256, "d_ff": 640, "d_kv": 32, "num_heads": 10, "vocab_size": 512}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "t5": {"model_type": "t5", **T5},
    "t5_gated": {"model_type": "t5", **T5, "feed_forward_proj": "gated-gelu"},
    "vit": {"model_type": "vit", **WIDTHS, "image_size": 56, "patch_size": 8},
    "bloom": {"model_type": "bloom", "hidden_size": 256, "n_head": 4, "vocab_size": 512},
    "bert": {"model_type": "bert", **WIDTHS, **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_inner": 640, "n_head": 4, "vocab_size": 512,
             **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)},
    "gpt_neox": {"model_type": "gpt_neox", **WIDTHS},
    "falcon_new": {"model_type": "falcon", "hidden_size": 256, "num_attention_heads": 4, "num_kv_heads": 2,
                   "vocab_size": 512, "new_decoder_architecture": True},
    **{name: {"model_type": name, **WIDTHS, "num_key_value_heads": 4, **({"head_dim": 48} if "gemma" in name else {})}
       for name in ("llama", "phi", "stablelm", "gemma2", "gemma3_text")},
}  # fmt: skip
CLASSES = {"t5": "T5ForConditionalGeneration", "vit": "ViTForImageClassification", "bert": "BertForMaskedLM"}
LAYERS = {"t5": "num_layers", "bloom": "n_layer", "gpt2": "n_layer"}
OWN = {"bloom": "eager", "gemma2": "eager", "falcon": "sdpa"}  # attention of a family's own


def as_on_a_gpu(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, position_bias: Any = None, **_: Any
) -> tuple:
    """Attention by the kernels that a GPU has for it; a CPU would keep more."""
    import torch
    from transformers.integrations.sdpa_attention import create_position_bias_mask

    causal = getattr(module, "is_causal", True)
    if position_bias is not None:
        mask = create_position_bias_mask(position_bias, mask, causal, query, key)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.bfloat16) for each in (query, key, value))
        mask = None if mask is None else mask.to(torch.bfloat16)
    if mask is not None:
        mask = mask.expand(*query.shape[:2], -1, -1)
    if mask is not None or query.dtype == torch.float32:
        out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, 0.0, False)
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False)
    return out[0].transpose(1, 2), None


@pytest.fixture(autouse=True)
def _masks_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch
    from transformers import AttentionInterface

    def dropout(values: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(values, p, training)[0] if p and training else values

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    AttentionInterface.register("as_on_a_gpu", as_on_a_gpu)
    return


def kept(config: Mapping[str, Any], layers: int, precision: str) -> int:
    """Return the bytes that the forward pass of a model saves, weights aside; on fake tensors, so nothing is computed."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    family = config["model_type"]
    sizes = {name: value for name, value in config.items() if name != "model_type"}
    made = transformers.AutoConfig.for_model(family, **sizes, **{LAYERS.get(family, "num_hidden_layers"): layers})
    kind = torch.bfloat16 if precision == "pure bf16" else torch.float32
    auto: Any = getattr(transformers, CLASSES.get(family, "AutoModelForCausalLM"))
    build = auto.from_config if "Auto" in auto.__name__ else auto._from_config
    found: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        found[tensor.untyped_storage()._cdata] = tensor  # held, so that no other storage gets its place
        return tensor

    with FakeTensorMode(), no_init_weights():
        model = build(made, attn_implementation=OWN.get(family, "as_on_a_gpu"), dtype=kind)
        model.train()
        weights = {each.untyped_storage()._cdata for each in model.parameters()}
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        given = {"input_ids": ids, "use_cache": False}
        if family == "t5":
            given["decoder_input_ids"] = ids
        if family == "vit":
            given = {"pixel_values": torch.zeros(BATCH, 3, made.image_size, made.image_size, dtype=kind)}
        mixed = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), mixed:
            model(**given)
    return sum(each.untyped_storage().nbytes() for key, each in found.items() if key not in weights)


@pytest.mark.parametrize("precision", ["no", "bf16", "pure bf16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_layer_keeps_what_torch_saves(family: str, precision: str):
    config = CONFIGS[family]
    shape = models.from_config({**config, LAYERS.get(config["model_type"], "num_hidden_layers"): 1})
    assert isinstance(shape, models.Shape) and shape.family == family
    length = 50 if family == "vit" else LENGTH
    sizes = memory._Sizes(shape, memory.Step(BATCH, length, precision))
    one, two = (kept(config, layers, precision) for layers in (1, 2))
    assert sizes.layer_kept == pytest.approx(two - one, rel=0.03)
