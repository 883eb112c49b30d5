"""The table of published trainings (docs/published.csv) against the forecast of their time."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cloudtrain.forecast import models, speed
from cloudtrain.forecast.memory import Step
from cloudtrain.forecast.models import Shape
from cloudtrain.forecast.network import GB, REACHED, Band, pool

DOCS = Path(__file__).parent
PER_NODE = 8


def _mpt(width: int, heads: int, layers: int) -> Shape:
    return Shape("gpt2", width, 4 * width, layers, heads, width, width, 50368, True)


# Where the rows are from, by the first letter of their source. All were opened on 2026-11-30, those of T, F, B and N before.
#   T torchtitan, benchmarks/ (TA, TH and TP in it) · F mosaicml/llm-foundry, scripts/train/benchmarking/README.md · B
#   Megatron-Bridge 25.11 · N NeMo 24.12, docs.nvidia.com/nemo-framework/user-guide/24.12/nemotoolkit/performance
#   Q https://github.com/QwenLM/Qwen README.md at 2df8e8a (2026-03-05): s/it of 8 micro-batches of one sample
#   V https://github.com/VectorInstitute/vectorlm docs/reference_throughput.md and profiling/configs at 9045f08 (2024-05-28)
#   L https://github.com/lambdal/deeplearning-benchmark pytorch/*-fp16.csv, and results/A40, 2xA40 at aa5addb6 (2025-12-17)
#   D https://github.com/NVIDIA/DeepLearningExamples PyTorch/LanguageModeling/BERT/README.md at 729963dd (2024-04-04), without
#     phase 2, whose sequences are shorter than it says (bins)
#   P https://github.com/deepspeedai/DeepSpeed docs/_tutorials/bert-finetuning.md at edaa7221 (2026-08-22)
#   I https://github.com/foundation-model-stack/fms-fsdp README.md at 5a296af (2025-07-10)
#   Y https://github.com/jzhang38/TinyLlama README.md and pretrain/tinyllama.py at bf12224 (2024-02-04)
#   S https://github.com/rasbt/LLMs-from-scratch ch05/10_llm-training-speed/README.md at 06361583
#   M https://github.com/NVIDIA-NeMo/Automodel docs/performance-summary.md at 01926a5c (2025-10-02)
# Kept apart: drawn from the new rows before a forecast of them was made (random.Random(66).sample; two that were dropped
# with their source, by 67), and compared once.
# Qwen: config.json of fine-tuned copies on huggingface.co, whose inner width is twice that of a matrix.
# MPT: mosaicml/llm-foundry, scripts/train/yamls/pretrain. Llama 3.1 405B: config.json on huggingface.co.
SHAPES = {
    "mpt-1b": _mpt(2048, 16, 24),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 56, 48),
    "mpt-70b": _mpt(8192, 64, 80),
    "llama-3.1-405b": Shape("llama", 16384, 53248, 126, 128, 16384, 1024, 128256, False),
    "qwen-1.8b": Shape("qwen2", 2048, 5504, 24, 16, 2048, 2048, 151936, False),
    "qwen-7b": Shape("qwen2", 4096, 11008, 32, 32, 4096, 4096, 151936, False),
    "qwen-14b": Shape("qwen2", 5120, 13696, 40, 40, 5120, 5120, 152064, False),
    "qwen-72b": Shape("qwen2", 8192, 24576, 80, 64, 8192, 8192, 152064, False),
    "gpt2-untied": Shape("gpt2", 768, 3072, 12, 12, 768, 768, 50257, False, 1024),
}


class Compared(NamedTuple):
    """One published training: its kind of program, whether it is kept apart, its group, and its time over the forecast's lower end, middle and upper end."""

    number: int
    kind: str
    apart: bool
    group: str
    over: Band

    @property
    def inside(self) -> bool:
        """Whether it lies inside the stated band."""
        return self.over.low >= 1 >= self.over.high


def compared() -> Iterator[Compared]:
    """Yield the published trainings."""
    with open(DOCS / "published.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        shape = SHAPES.get(row["model"]) or models.find(row["model"], DOCS)
        assert isinstance(shape, Shape), shape
        number, gpus, gbps, shards, tensor, pipeline, context, batch, sequence = (
            int(row[name])
            for name in ("number", "gpus", "network_gbps", "shards", "tp", "pp", "cp", "batch", "sequence")
        )
        targets = (row["targets"],) if row["targets"] else ()
        step = Step(
            batch, sequence, row["precision"], row["checkpointing"] == "yes", row["strategy"], shards, tensor,
            pipeline, context, int(row["accumulation"]), lora=int(row["lora"]), targets=targets, quantized=row["quantized"],
        )  # fmt: skip
        machines = pool(row["gpu"], -(-gpus // PER_NODE), PER_NODE, "known")
        machines = machines._replace(network=Band(*(share * gbps / 8 * GB for share in REACHED)))
        made = speed.of_step(shape, step, machines, gpus // (tensor * pipeline * context), program=row["kind"])
        assert made is not None
        real_s = made.tokens / gpus / float(row["tokens_per_s"])
        yield Compared(
            number, row["kind"], row["apart"] == "yes", row["group"], Band(*(real_s / each for each in made.step))
        )


def table() -> list[str]:
    """Return the table's lines."""
    found = list(compared())
    rows = ["| trainings | cases | inside the band | time over the forecast's middle: median | lowest | highest |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    apart, found = [each for each in found if each.apart], [each for each in found if not each.apart]
    own_groups = {
        group: [each for each in found if each.group == group] for group in dict.fromkeys(each.group for each in found)
    }
    kinds = {f"{kind} programs": [each for each in found if each.kind == kind] for kind in ("fused", "eager")}
    for group, own in {**own_groups, **kinds, "all": found, "kept apart": apart}.items():
        middles = [each.over.middle for each in own]
        figures = f"{median(middles):.2f} | {min(middles):.2f} | {max(middles):.2f}"
        rows.append(f"| {group} | {len(own)} | {sum(each.inside for each in own)} | {figures} |")
    return rows
