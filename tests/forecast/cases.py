"""The trainings on which the fit forecast was adjusted, and those that were set aside before."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.forecast.memory import Step
from cloudtrain.forecast.models import Shape, from_config


class Case(NamedTuple):
    """One training: a model's configuration, and how it is trained."""

    config: Mapping[str, Any]
    batch: int = 2
    sequence: int = 1024
    precision: str = "bf16"  # no, bf16 (mixed), pure bf16
    checkpointing: bool = False
    shards: int = 1
    accumulation: int = 1
    chunked: bool = True
    lora: int = 0
    ddp: int = 1  # ranks

    @property
    def shape(self) -> Shape:
        found = from_config(self.config)
        assert isinstance(found, Shape), found
        return found

    @property
    def step(self) -> Step:
        strategy = "fsdp" if self.shards > 1 else "ddp" if self.ddp > 1 else "none"
        return Step(
            self.batch, self.sequence, self.precision, self.checkpointing, strategy, self.shards,
            accumulation=self.accumulation, chunked=self.chunked, lora=self.lora,
        )  # fmt: skip


def sizes(h: int, f: int, L: int, a: int, k: int, V: int, family: str = "llama", d: int = 64, **more: Any) -> dict:
    if family == "gpt2":
        dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return {
            "model_type": family, "n_embd": h, "n_inner": f, "n_layer": L, "n_head": a, "vocab_size": V,
            "n_positions": 1024, **dropouts, **more,
        }  # fmt: skip
    return {
        "model_type": family, "hidden_size": h, "intermediate_size": f, "num_hidden_layers": L, "num_attention_heads": a,
        "num_key_value_heads": k, "head_dim": d, "vocab_size": V, "tie_word_embeddings": True,
        "max_position_embeddings": 16384, "pad_token_id": 0, **more,
    }  # fmt: skip


UNTIED = {"tie_word_embeddings": False}
TINY = sizes(256, 688, 4, 4, 4, 8192)
SMALL = sizes(512, 1376, 8, 8, 8, 32000, **UNTIED)
GROUPED = sizes(512, 1536, 6, 8, 2, 32000)
MIDDLE = sizes(1024, 2816, 12, 16, 4, 50304)
ONE_B = sizes(2048, 8192, 16, 32, 8, 128256)
EIGHT_B = sizes(4096, 14336, 32, 32, 8, 128256, d=128, **UNTIED)


def _grid(name: str, config: Mapping[str, Any], **more: Any) -> dict[str, Case]:
    """Return a configuration in every precision, with and without checkpointing."""
    grouped = config.get("num_key_value_heads") != config.get("num_attention_heads")
    kinds = ("bf16", "pure bf16") if grouped and "n_embd" not in config else ("no", "bf16", "pure bf16")
    return {
        f"{name}, {kind}{', checkpointing' if again else ''}": Case(config, precision=kind, checkpointing=again, **more)
        for kind in kinds
        for again in (False, True)
    }


def _sharded(name: str, config: Mapping[str, Any], **more: Any) -> dict[str, Case]:
    return {
        f"{name}, fsdp {ranks}{', checkpointing' if again else ''}": Case(
            config, checkpointing=again, shards=ranks, **more
        )
        for ranks in (2, 8, 128)
        for again in (False, True)
    }


ADJUSTED: dict[str, Case] = {
    **_grid("tiny 4x512", TINY, batch=4, sequence=512),
    **_grid("small 4x1024", SMALL, batch=4),
    **_grid("grouped 8x1024", GROUPED, batch=8),
    **_grid("middle 2x2048", MIDDLE, sequence=2048),
    **_sharded("small 4x1024", SMALL, batch=4),
    **_sharded("middle 2x2048", MIDDLE, sequence=2048),
    "small 4x1024, fsdp 8, no": Case(SMALL, batch=4, shards=8, precision="no"),
    "small 1x256, fsdp 8": Case(SMALL, batch=1, sequence=256, shards=8),
    "small 1x64, one process": Case(SMALL, batch=1, sequence=64),
    "small 1x64, one process, no": Case(SMALL, batch=1, sequence=64, precision="no"),
    "tiny 16x256, whole logits": Case(TINY, batch=16, sequence=256, chunked=False),
    "small 4x1024, whole logits": Case(SMALL, batch=4, chunked=False),
    "small 4x1024, whole logits, no": Case(SMALL, batch=4, precision="no", chunked=False),
    "middle 2x2048, whole logits, checkpointing": Case(MIDDLE, sequence=2048, checkpointing=True, chunked=False),
    "small 2x1024, two micro-batches": Case(SMALL, accumulation=2),
    "small 2x1024, two micro-batches, checkpointing": Case(SMALL, accumulation=2, checkpointing=True),
    "one_b 1x2048": Case(ONE_B, batch=1, sequence=2048),
    "one_b 4x2048": Case(ONE_B, batch=4, sequence=2048),
    "one_b 4x2048, checkpointing": Case(ONE_B, batch=4, sequence=2048, checkpointing=True),
    "one_b 4x2048, fsdp 8": Case(ONE_B, batch=4, sequence=2048, shards=8),
    "one_b 4x2048, whole logits": Case(ONE_B, batch=4, sequence=2048, chunked=False),
    "eight_b 2x8192, fsdp 8, checkpointing": Case(EIGHT_B, sequence=8192, shards=8, checkpointing=True),
    "eight_b 1x4096, fsdp 8": Case(EIGHT_B, batch=1, sequence=4096, shards=8),
    **{
        f"{family} 4x1024": Case(sizes(512, 1536, 4, 8, 8, 16000, family), batch=4)
        for family in ("mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo", "olmo2")
    },
    **{
        f"mostly embeddings 1x32, fsdp 8, {kind}, {'tied' if tied else 'untied'}": Case(
            sizes(512, 688, 2, 8, 8, 32000, tie_word_embeddings=tied), 1, 32, kind, shards=8
        )
        for kind in ("no", "bf16")
        for tied in (True, False)
    },
    "tiny 1x64": Case(TINY, 1, 64),
}
HELD_OUT: dict[str, Case] = {
    "three to one 3x768": Case(sizes(768, 2048, 10, 12, 4, 49152), batch=3, sequence=768),
    "three to one 3x768, checkpointing": Case(sizes(768, 2048, 10, 12, 4, 49152), 3, 768, checkpointing=True),
    "three to one 3x768, fsdp 4": Case(sizes(768, 2048, 10, 12, 4, 49152), 3, 768, shards=4),
    "three to one 3x768, fsdp 16": Case(sizes(768, 2048, 10, 12, 4, 49152), 3, 768, shards=16),
    "wide vocabulary 2x512": Case(sizes(640, 1792, 5, 10, 10, 100352, **UNTIED), 2, 512),
    "wide vocabulary 2x512, no": Case(sizes(640, 1792, 5, 10, 10, 100352, **UNTIED), 2, 512, "no"),
    "wide vocabulary 2x512, whole logits": Case(sizes(640, 1792, 5, 10, 10, 100352), 2, 512, chunked=False),
    "long 1x8192": Case(sizes(1024, 3584, 6, 16, 16, 32000), 1, 8192),
    "long 1x8192, checkpointing": Case(sizes(1024, 3584, 6, 16, 16, 32000), 1, 8192, checkpointing=True),
    "long 1x8192, fsdp 4, checkpointing": Case(sizes(1024, 3584, 6, 16, 16, 32000), 1, 8192, "bf16", True, 4),
    "deep 8x512, three micro-batches": Case(sizes(384, 1024, 20, 6, 6, 24000), 8, 512, accumulation=3),
    "deep 8x512, no, checkpointing": Case(sizes(384, 1024, 20, 6, 6, 24000), 8, 512, "no", True),
    "deep 8x512, fsdp 32": Case(sizes(384, 1024, 20, 6, 6, 24000), 8, 512, shards=32),
    "three_b 1x2048, fsdp 4": Case(sizes(3072, 8192, 12, 24, 8, 128256, d=128), 1, 2048, shards=4),
    "three_b 2x4096, checkpointing": Case(sizes(3072, 8192, 12, 24, 8, 128256, d=128), 2, 4096, checkpointing=True),
    "qwen2 grouped 2x1500": Case(sizes(896, 4864, 6, 14, 2, 151936, "qwen2"), 2, 1500),
    "qwen3 grouped 3x1024, checkpointing": Case(
        sizes(1024, 3072, 6, 16, 8, 151936, "qwen3", d=128), 3, 1024, checkpointing=True
    ),
    "qwen3 grouped 3x1024, fsdp 8": Case(sizes(1024, 3072, 6, 16, 8, 151936, "qwen3", d=128), 3, 1024, shards=8),
    "gemma one key head 2x1024": Case(sizes(1024, 8192, 4, 4, 1, 256000, "gemma", d=256), 2, 1024),
    "phi3 4x512": Case(sizes(768, 2048, 6, 8, 8, 32064, "phi3", d=96, **UNTIED), 4, 512),
    "olmo2 4x700, fsdp 8": Case(sizes(768, 2048, 6, 12, 12, 100352, "olmo2", **UNTIED), 4, 700, shards=8),
    "mistral grouped 6x512, pure bf16": Case(
        sizes(768, 2560, 6, 12, 4, 32768, "mistral", **UNTIED), 6, 512, "pure bf16"
    ),
}
CASES = ADJUSTED | HELD_OUT
_ROWS = list(csv.DictReader((Path(__file__).parent / "oracle.csv").open()))
COUNTED = {row["case"]: int(row["bytes"]) for row in _ROWS}
TORCH = {row["torch"] for row in _ROWS}  # versions that have counted
