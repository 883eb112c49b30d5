"""Sizes of a language model: from a config.json, from the hub's cache, or from a table of named models."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_USUAL = {
    "hidden": "hidden_size", "inner": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "positions": "max_position_embeddings",
}  # fmt: skip
_GPT2 = {"hidden": "n_embd", "inner": "n_inner", "layers": "n_layer", "heads": "n_head", "positions": "n_positions"}
_DISTILBERT = _USUAL | {"hidden": "dim", "inner": "hidden_dim", "layers": "n_layers", "heads": "n_heads"}
_DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout_prob",
             "attention_probs_dropout_prob", "dropout")  # fmt: skip


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
    names: Mapping[str, str] | None = None


_PLAIN = (9, 1, 0, 0, 0)  # two layer norms, a bias for each matrix
FAMILIES: Mapping[str, Family] = {
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

# family, width, feed-forward, layers, heads, key heads, width of a head, vocabulary, 1 where embeddings are tied.
# Source: each one's config.json on huggingface.co; tests/forecast/test_models.py compares the published parameters.
NAMED: Mapping[str, tuple[str, int, int, int, int, int, int, int, int]] = {
    "llama-2-7b": ("llama", 4096, 11008, 32, 32, 32, 128, 32000, 0),
    "llama-2-13b": ("llama", 5120, 13824, 40, 40, 40, 128, 32000, 0),
    "llama-3-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, 0),
    "llama-3-70b": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, 0),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, 1),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, 1),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, 0),
    "llama-3.1-70b": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, 0),
    "llama-3.3-70b": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, 0),
    "mistral-7b-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, 0),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 1),
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, 1),
    "qwen2.5-3b": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, 1),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 0),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 0),
    "gemma-2b": ("gemma", 2048, 16384, 18, 8, 1, 256, 256000, 1),
    "gemma-7b": ("gemma", 3072, 24576, 28, 16, 16, 256, 256000, 1),
    "phi-3-mini-4k": ("phi3", 3072, 8192, 32, 32, 32, 96, 32064, 0),
    "olmo-2-1124-7b": ("olmo2", 4096, 11008, 32, 32, 32, 128, 100352, 0),
    "gpt2": ("gpt2", 768, 3072, 12, 12, 12, 64, 50257, 1),
    "gpt2-medium": ("gpt2", 1024, 4096, 24, 16, 16, 64, 50257, 1),
    "gpt2-large": ("gpt2", 1280, 5120, 36, 20, 20, 64, 50257, 1),
    "gpt2-xl": ("gpt2", 1600, 6400, 48, 25, 25, 64, 50257, 1),
    "bert-base-uncased": ("bert", 768, 3072, 12, 12, 12, 64, 30522, 1),
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

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's matrices."""
        inner = (3 if FAMILIES[self.family].gated else 2) * self.hidden * self.inner
        return self.hidden * (2 * self.queries + 2 * self.keys) + inner

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
        return self.embedding * (1 if self.tied else 2) + vectors

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer + self.root


def find(name: str, folder: Path) -> Shape | str:
    """Return the sizes of a model that is a folder with a config.json, in the hub's cache, or named in the table.

    Args:
        name: a folder, absolute or below `folder`; a name on the hub; or a name in NAMED.
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
    for suffix in _SUFFIXES:
        short = short.removesuffix(suffix)
    if short not in NAMED:
        near = get_close_matches(short, NAMED, 3, 0.6)
        known = f"; known by name: {', '.join(near)}" if near else ""
        where = "there is no config.json in a folder or in the Hugging Face cache"
        return f"the sizes of {name} are unknown: {where}, and nothing has checked that name{known}"
    family, hidden, inner, layers, heads, key_heads, width, vocabulary, tied = NAMED[short]
    kind = FAMILIES[family]
    positions = {"gpt2": 1024, "bert": 512}.get(family, 0)
    return Shape(
        family, hidden, inner, layers, heads, heads * width, key_heads * width, vocabulary, bool(tied), positions,
        kind.dropout,
    )  # fmt: skip


def from_config(config: Mapping[str, Any]) -> Shape | str:
    """Return the sizes in a model's config.json, or why they are not supported; raises KeyError where one is missing."""
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        return f"models of type {family} are not supported"
    kind = FAMILIES[family]
    names = kind.names or _USUAL
    hidden, layers, heads = (int(config[names[key]]) for key in ("hidden", "layers", "heads"))
    width = int(config.get("head_dim") or kind.head_dim or hidden // heads)
    inner = config.get(names["inner"]) or (4 * hidden if not kind.gated else None)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else 0
    given = [float(config[name]) for name in _DROPOUTS if isinstance(config.get(name), int | float)]
    special = next((name for name in ("quantization_config", "num_local_experts") if config.get(name)), "")
    if config.get("attention_bias") or config.get("mlp_bias"):
        special = "attention_bias"
    return Shape(
        family, hidden, int(inner or 0) or int(config[names["inner"]]), layers, heads, heads * width,
        int(config.get("num_key_value_heads") or heads) * width, int(config["vocab_size"]),
        bool(config.get("tie_word_embeddings", kind.tied)),
        int(config.get(names["positions"]) or 512) if kind.learned_positions else 0,
        max(given, default=kind.dropout), int(window or 0), special,
    )  # fmt: skip


def _cached(name: str) -> list[Path]:
    """Return where the hub's cache has a model's config.json, the newest first."""
    home = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    found = cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json") if name.count("/") < 2 else ()
    return sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)
