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


# MPT: mosaicml/llm-foundry, scripts/train/yamls/pretrain. Llama 3.1 405B: config.json on huggingface.co.
SHAPES = {
    "mpt-1b": _mpt(2048, 16, 24),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 56, 48),
    "mpt-70b": _mpt(8192, 64, 80),
    "llama-3.1-405b": Shape("llama", 16384, 53248, 126, 128, 16384, 1024, 128256, False),
}


class Compared(NamedTuple):
    """One published training: its group, and its time over the forecast's lower end, middle and upper end."""

    number: int
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
        step = Step(
            batch, sequence, row["precision"], row["checkpointing"] == "yes", row["strategy"], shards, tensor,
            pipeline, context,
        )  # fmt: skip
        machines = pool(row["gpu"], -(-gpus // PER_NODE), PER_NODE, "known")
        machines = machines._replace(network=Band(*(share * gbps / 8 * GB for share in REACHED)))
        made = speed.of_step(shape, step, machines, gpus // (tensor * pipeline * context))
        assert made is not None
        real_s = made.tokens / gpus / float(row["tokens_per_s"])
        yield Compared(number, row["group"], Band(*(real_s / each for each in made.step)))


def table() -> list[str]:
    """Return the table's lines."""
    found = list(compared())
    rows = ["| trainings | cases | inside the band | time over the forecast's middle: median | lowest | highest |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for group in (*dict.fromkeys(each.group for each in found), "all"):
        own = [each for each in found if group in (each.group, "all")]
        middles = [each.over.middle for each in own]
        figures = f"{median(middles):.2f} | {min(middles):.2f} | {max(middles):.2f}"
        rows.append(f"| {group} | {len(own)} | {sum(each.inside for each in own)} | {figures} |")
    return rows
