"""Sizes of a model: from a config.json, from the hub's cache, or from the table of named models (models.csv)."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

_USUAL = {
    "hidden": "hidden_size", "inner": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "positions": "max_position_embeddings",
}  # fmt: skip
_GPT2 = {"hidden": "n_embd", "inner": "n_inner", "layers": "n_layer", "heads": "n_head", "positions": "n_positions"}
_DISTILBERT = _USUAL | {"hidden": "dim", "inner": "hidden_dim", "layers": "n_layers", "heads": "n_heads"}
_BLOOM = _USUAL | {"layers": "n_layer", "heads": "n_head"}
_T5 = {"hidden": "d_model", "inner": "d_ff", "layers": "num_layers", "heads": "num_heads", "positions": ""}
_SPECIAL = ("quantization_config", "mlp_only_layers", "use_qkv_bias", "qk_layernorm", "alibi", "bias")  # not counted
_DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout_prob",
             "attention_probs_dropout_prob", "dropout", "hidden_dropout", "dropout_rate")  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What a family has beside its matrices, and what its configuration class says where a config.json says nothing.

    Source: transformers 5.23, models/<family>/configuration_<family>.py and modeling_<family>.py, read on 2026-11-23.
    """

    vectors: tuple[int, int, int, int, int] = (2, 0, 0, 0, 0)  # of a layer: multiples of h, f, q, k and a head's width
    gated: bool = True  # three matrices in the feed-forward part, not two
    last: int = 1  # vectors of width h outside the layers
    tied: bool = False
    learned_positions: bool = False
    dropout: float = 0.0
    head_dim: int | None = None  # None: width over heads
    head_bias: bool = False
    names: Mapping[str, str] | None = None
    attentions: int = (
        1  # of a layer: an encoder's and its decoder's are one layer with three, and two feed-forward parts
    )
    feeds: int = 1


_PAIR = (5, 0, 0, 0, 0)  # norms of an encoder's layer and of its decoder's
_PLAIN = (9, 1, 0, 0, 0)  # two layer norms, a bias for each matrix
_FALCON = _USUAL | {"inner": "ffn_hidden_size"}
# What the shared trainer builds from its arguments alone.
FROM_SCRATCH: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family((2, 0, 1, 2, 0)),
    "qwen3": Family((2, 0, 0, 0, 2), head_dim=128),
    "gemma": Family(tied=True, head_dim=256),
    "phi3": Family(),
    "olmo": Family((0, 0, 0, 0, 0), last=0),
    "olmo2": Family((2, 0, 1, 1, 0)),
    "gpt2": Family(_PLAIN, False, 2, True, True, 0.1, names=_GPT2),
    "bert": Family(_PLAIN, False, 4, True, True, 0.1),
    "roberta": Family(_PLAIN, False, 3, True, True, 0.1),
    "distilbert": Family(_PLAIN, False, 2, True, True, 0.1, names=_DISTILBERT),
}
FAMILIES: Mapping[str, Family] = {
    **FROM_SCRATCH,
    "gemma2": Family((4, 0, 0, 0, 0), tied=True, head_dim=256),
    "gemma3_text": Family((4, 0, 0, 0, 2), tied=True, head_dim=256),
    "mixtral": Family(),
    "qwen3_moe": Family((2, 0, 0, 0, 2), names=_USUAL | {"inner": "moe_intermediate_size"}),
    "qwen2_moe": Family((2, 0, 1, 2, 0), names=_USUAL | {"inner": "moe_intermediate_size"}),
    "phi": Family((4, 1, 1, 2, 0), False, 2, head_bias=True),
    "gpt_neox": Family(_PLAIN, False, 2),
    "stablelm": Family((4, 0, 0, 0, 0), last=2),
    "falcon": Family((2, 0, 0, 0, 0), False, 2, True, names=_FALCON),
    "falcon_new": Family((4, 0, 0, 0, 0), False, 2, True, names=_FALCON),  # new_decoder_architecture
    "bloom": Family(_PLAIN, False, 4, True, names=_BLOOM),
    "t5": Family(_PAIR, False, 2, True, dropout=0.1, names=_T5, attentions=3, feeds=2),
    "t5_gated": Family(_PAIR, True, 2, True, dropout=0.1, names=_T5, attentions=3, feeds=2),  # v1.1, Flan, mT5
    "vit": Family(_PLAIN, False, 3, True, True),
}

_SUFFIXES = ("-instruct", "-chat", "-it", "-hf", "-base")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: widths and counts."""

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    queries: int  # width of all query heads together
    keys: int  # width of all key heads together
    vocabulary: int
    tied: bool
    positions: int = 0  # learned ones
    dropout: float = 0.0
    window: int = 0  # tokens that attention looks back; 0: all
    special: str = ""  # a part of the configuration that is not counted
    experts: int = 0  # feed-forward parts of a layer, with a router; 0: one part without
    active: int = 1  # that a token takes
    shared: int = 0  # width of a part beside the experts that every token takes, with a gate
    extra: int = 0  # parameters outside the layers that no other size says

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's matrices, of all experts."""
        return self._matrices(self.experts)

    @property
    def active_matrices(self) -> int:
        """Parameters of the matrices of a layer that a token goes through."""
        return self._matrices(self.active if self.experts else 0)

    @property
    def linear_matrices(self) -> int:
        """Parameters of a layer's linear modules: in transformers 5 experts and their router are none."""
        beside = 2 * (self.queries + self.keys) + 3 * self.shared + bool(self.shared)
        return self.hidden * beside if self.experts else self.layer_matrices

    def _matrices(self, experts: int) -> int:
        kind = FAMILIES[self.family]
        inner = (3 if kind.gated else 2) * self.hidden * self.inner * max(1, experts) * kind.feeds
        beside = 3 * self.shared + bool(self.shared)
        return self.hidden * (2 * (self.queries + self.keys) * kind.attentions + self.experts + beside) + inner

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        widths = (self.hidden, self.inner, self.queries, self.keys, self.queries // self.heads)
        pairs = zip(FAMILIES[self.family].vectors, widths, strict=True)
        return self.layer_matrices + sum(count * width for count, width in pairs)

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the layers."""
        vectors = (FAMILIES[self.family].last + self.positions) * self.hidden
        bias = self.vocabulary if FAMILIES[self.family].head_bias else 0
        return self.embedding * (1 if self.tied else 2) + vectors + bias + self.extra

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer + self.root


def find(name: str, folder: Path) -> Shape | str:
    """Return the sizes of a model that is a folder with a config.json, in the hub's cache, or named in the table.

    Args:
        name: a folder, absolute or below `folder`; a name on the hub; or a name in models.csv.
        folder: the job's source.

    Returns:
        The sizes, or why they are not known. Blocking: reads one small file. Asks no network.
    """
    for config in (folder / name / "config.json", *_cached(name)):
        try:
            return from_config(json.loads(config.read_text("utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    short = name.rpartition("/")[2].lower().removeprefix("meta-")  # Meta-Llama-3-8B
    names = [short, *(short.removesuffix(suffix) for suffix in _SUFFIXES)]
    known = named()
    if found := next((known[each] for each in names if each in known), None):
        return found
    near = get_close_matches(names[-1], known, 3, 0.6)
    like = f"; known by name: {', '.join(near)}" if near else ""
    where = "there is no config.json in a folder or in the Hugging Face cache"
    return f"the sizes of {name} are unknown: {where}, and nothing has checked that name{like}"


@cache
def named() -> Mapping[str, Shape]:
    """Return the sizes of the table of models by name; blocking (one small file)."""
    with open(Path(__file__).parent / "models.csv", encoding="utf-8", newline="") as file:
        return {row["name"]: _shape(row) for row in csv.DictReader(line for line in file if not line.startswith("#"))}


def _shape(row: Mapping[str, str]) -> Shape:
    kind = FAMILIES[row["family"]]
    heads, width = int(row["heads"]), int(row["head_dim"])
    return Shape(
        row["family"], int(row["hidden"]), int(row["inner"]), int(row["layers"]), heads, heads * width,
        int(row["key_heads"]) * width, int(row["vocabulary"]), row["tied"] == "1", int(row["positions"] or 0), kind.dropout,
        special=row["without"], experts=int(row["experts"] or 0), active=int(row["active"] or 1),
        shared=int(row["shared"] or 0), extra=int(row["extra"] or 0),
    )  # fmt: skip


def from_config(config: Mapping[str, Any]) -> Shape | str:
    """Return the sizes in a model's config.json, or why they are not supported; raises KeyError where one is missing."""
    family = str(config.get("model_type"))
    if family == "gemma3":
        text = from_config({"model_type": "gemma3_text", **config["text_config"]})
        return text if isinstance(text, str) else replace(text, special="the vision tower")
    if family == "falcon" and config.get("new_decoder_architecture"):
        family = "falcon_new"
    if family in ("t5", "mt5"):
        family = "t5_gated" if str(config.get("feed_forward_proj", family)).startswith(("gated", "mt5")) else "t5"
    if family not in FAMILIES:
        return f"models of type {family} are not supported"
    kind = FAMILIES[family]
    names = kind.names or _USUAL
    hidden, layers, heads = (int(config[names[key]]) for key in ("hidden", "layers", "heads"))
    width = int(config.get("head_dim") or config.get("d_kv") or kind.head_dim or hidden // heads)
    inner = config.get(names["inner"]) or (4 * hidden if not kind.gated else None)
    moe = family in ("mixtral", "qwen2_moe", "qwen3_moe")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else 0
    given = [float(config[name]) for name in _DROPOUTS if isinstance(config.get(name), int | float)]
    experts = int(config["num_local_experts"] if family == "mixtral" else config["num_experts"] if moe else 0)
    special = next((name for name in _SPECIAL if config.get(name)), "")
    usual = {"num_decoder_layers": layers, "decoder_sparse_step": 1}
    special = next((name for name, value in usual.items() if config.get(name, value) not in (None, value)), special)
    if (config.get("attention_bias") and family != "gpt_neox") or config.get("mlp_bias"):
        special = "attention_bias"
    key_heads = int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)
    if family == "falcon":
        key_heads = 1 if config.get("multi_query", True) else heads
    positions, extra = _positions(family, config, hidden, heads)
    return Shape(
        family, hidden, int(inner or 0) or int(config[names["inner"]]), layers, heads, heads * width,
        key_heads * width, 0 if family == "vit" else int(config["vocab_size"]),
        bool(config.get("tie_word_embeddings", kind.tied)) or family == "vit", positions,
        max(given, default=kind.dropout), int(window or 0), special, experts,
        int(config["num_experts_per_tok"]) if moe else 1, int(config.get("shared_expert_intermediate_size") or 0), extra,
    )  # fmt: skip


def _positions(family: str, config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Return the learned positions of a model, and its parameters outside the layers that no other size says."""
    kind = FAMILIES[family]
    if family == "vit":  # the matrix of a patch, and that of the classes
        image, patch = int(config["image_size"]), int(config["patch_size"])
        classes = int(config.get("num_labels") or len(config.get("id2label") or (0, 1)))
        pixels = patch**2 * int(config.get("num_channels") or 3)
        return (image // patch) ** 2 + 1, (pixels + 1) * hidden + classes * (hidden + 1)
    if kind.attentions > 1:  # relative positions of the encoder and of the decoder
        return 0, 2 * heads * int(config.get("relative_attention_num_buckets") or 32)
    places = (kind.names or _USUAL)["positions"]
    return (int(config.get(places) or 512) if kind.learned_positions else 0), 0


def _cached(name: str) -> list[Path]:
    """Return where the hub's cache has a model's config.json, the newest first."""
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    found = cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json") if name.count("/") < 2 else ()
    return sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)
