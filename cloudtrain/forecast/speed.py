"""Time of one optimizer step: work over the speed of GPUs, communication over their links and the network.

FLOPs are counted as entrypoints/trainer/mfu.py does it. A time is a band: 10 %, 50 % and 90 % of trainings are faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.forecast import adapters
from cloudtrain.forecast.devices import peak_flops
from cloudtrain.forecast.memory import Step
from cloudtrain.forecast.models import FAMILIES, Shape
from cloudtrain.forecast.network import Band, Pool

# Share of a GPU's peak (MFU) of which 10, 50 and 90 % of published bf16 trainings had less. Source: mosaicml/llm-foundry,
# scripts/train/benchmarking/README.md at 49521837 (2024-04-22): 62, 57 and 76 rows, without the 14 of docs/published.csv.
_H100 = (0.320, 0.403, 0.433)
MFU = {
    "A100-40GB": (0.434, 0.511, 0.561),
    "A100-80GB": (0.452, 0.533, 0.597),
    "H100": _H100,
    "H200": _H100,  # no bf16 row was found; its cores are H100's
    "B200": _H100,  # no bf16 row was found
    # In fp16: BERT-large, 42 rows of one node (8 V100 of 16 GB; 8 and 16 of 32 GB). Source: NVIDIA/DeepLearningExamples,
    # PyTorch/LanguageModeling/BERT/README.md at 23a6382c (2020-03), read 2026-11-30.
    "V100-16GB": (0.178, 0.242, 0.356),
    "V100-32GB": (0.178, 0.242, 0.356),
    # 0.69 to 0.90 of an A100's share in the same BERT trainings (docs/published.csv, L)
    **dict.fromkeys(("A10", "A40", "A6000"), (0.29, 0.41, 0.48)),
}
# What of those shares programs reach, by the rows of docs/published.csv that are not kept apart: fused or compiled layers,
# eager scripts, and of these the trainings of transformers' layers (V, Q, M), which the shared trainer has too. It was not
# measured on a GPU.
PROGRAMS = {"trainer": (0.75, 1.0, 1.0), "eager": (0.55, 1.0, 1.0), "fused": (0.75, 1.1, 1.15)}
# FP8 against bf16: the data sheet promises twice the speed, 6 pairs of rows of that source have 1.12, later programs in
# docs/published.csv more. The shared trainer has no FP8.
_FP8 = (1.0, 1.5, 2.0)
_AGAIN = (1.0, 1.2, 4 / 3)  # checkpointing: work that is done again, as far as it shows
# LoRA against training all parameters: a third less work at most, since frozen matrices have no gradient; docs/published.csv
# has 1.06 to 1.15 times the tokens/s (V). QLoRA against LoRA: 0.96 to 1.40 there (Q), 1.28 on a 4090 (pytorch/torchtune
# README.md at bd2a0fc7, 2026-04-23), 1.56 and 2.0 for short samples (Lightning-AI/litgpt, tutorials/resource-tables.md at
# 26857050).
_LORA = (0.6, 0.8, 1.0)
_QLORA = (1.0, 1.25, 1.6)
_KERNELS_S = 0.001  # a layer's kernels are started in that time, forward and backward; opinion


@dataclass(frozen=True)
class Speed:
    """How long a step takes, and what of that is computed and communicated, in seconds."""

    step: Band
    compute: Band
    communication: Band
    tokens: int  # of a step, of all ranks
    busy: bool  # kernels are long enough for the figures: short ones wait for each other's start


def flops_per_token(shape: Shape, sequence: int) -> float:
    """Return the FLOPs that a model's training does for a token, forward and backward."""
    matrices = shape.layers * shape.active_matrices + shape.embedding
    return 6 * matrices + 12 * shape.layers * shape.queries * sequence * FAMILIES[shape.family].attentions


def of_step(
    shape: Shape, step: Step, pool: Pool, ranks: int, peak: float | None = None, program: str = "trainer"
) -> Speed | None:
    """Return the time of an optimizer step.

    Args:
        shape: the model.
        step: how it is trained.
        pool: the GPUs.
        ranks: data-parallel ranks, which take samples of their own.
        peak: FLOP/s of a GPU that no data sheet is known of.
        program: what trains, as PROGRAMS has it.

    Returns:
        The time; None where the GPU's speed or the network between the nodes is not known.
    """
    peak = peak_flops(pool.gpu, "bf16" if step.precision == "fp8" else step.precision) or peak
    if peak is None or (pool.network is None and pool.nodes > 1):
        return None
    split = step.tensor * step.pipeline * step.context
    work = step.batch * step.sequence * flops_per_token(shape, step.sequence) / split * step.accumulation
    shares = MFU.get(pool.gpu) or MFU["A100-40GB"]
    fast = [share * reached for share, reached in zip(shares, PROGRAMS[program], strict=True)]
    again: tuple[float, ...] = _AGAIN if step.checkpointing else (1.0, 1.0, 1.0)
    if step.lora:
        again = tuple(each * share for each, share in zip(again, _LORA, strict=True))
    if step.quantized:
        again = tuple(each * slower for each, slower in zip(again, _QLORA, strict=True))
    gain = _FP8 if step.precision == "fp8" else (1.0, 1.0, 1.0)
    pieces = step.batch if step.pipeline > 1 else 1  # that go through a pipeline one after the other
    kernels = _KERNELS_S * shape.layers / step.pipeline * pieces * step.accumulation
    once = Band(*(work * again[at] / (peak * fast[2 - at] * gain[2 - at]) for at in range(3)))
    compute = Band(once.low, max(once.middle, kernels / 2), max(once.high, kernels))
    data, model = _data_parallel(shape, step, pool, ranks), _model_parallel(shape, step, pool)
    bubble = (step.pipeline - 1) / pieces
    low = (max(compute.low, data.low) + model.low) * (1 + bubble / 2)
    middle = max(compute.middle, data.middle) + 0.3 * min(compute.middle, data.middle) + model.middle
    high = compute.high + data.high + model.high
    whole = Band(low, middle * (1 + bubble), high * (1 + bubble))
    tokens = step.batch * step.sequence * step.accumulation * ranks
    return Speed(whole, compute, data.plus(model), tokens, once.low >= kernels)


def _over(count: int, pool: Pool, bytes_: float, *, apart: int = 1) -> Band:
    """Return the seconds in which `count` ranks pass on `bytes_`, those of one node as neighbours.

    A ring enters a node once: a group of several nodes has the node's network, shared by the groups that use it at once.
    `apart` is how far the ranks of a group are from each other.
    """
    here = max(1, min(count, pool.per_node // apart))
    inside = bytes_ * (here - 1) / here
    passed = [inside / rate for rate in reversed(pool.link)]
    if count > here and pool.network:
        groups = max(1, min(apart, pool.per_node))
        across = bytes_ * (count - 1) / count * groups
        passed = [max(own, across / rate) for own, rate in zip(passed, reversed(pool.network), strict=True)]
    return Band(*passed)


def _data_parallel(shape: Shape, step: Step, pool: Pool, ranks: int) -> Band:
    """Return the seconds of gradients and of parameters that are gathered, for one optimizer step."""
    own = shape.parameters / (step.tensor * step.pipeline)
    learned = adapters.parameters(shape, step.lora, step.targets) if step.lora else own
    computed = 4 if step.precision == "no" else 2
    together = ranks * step.context
    if step.strategy in ("fsdp", "hsdp", "zero3"):
        # parameters are gathered twice and gradients are reduced in float32, for each micro-batch
        each = _over(step.shards, pool, (2 * computed * own + 4 * learned) * step.accumulation, apart=step.tensor)
        copies = together // step.shards
        return each.plus(_over(copies, pool, 8 * learned / step.shards, apart=step.shards * step.tensor))
    if together == 1:
        return Band(0, 0, 0)
    return _over(together, pool, 8 * learned, apart=step.tensor)


def _model_parallel(shape: Shape, step: Step, pool: Pool) -> Band:
    """Return the seconds of what tensor, context and pipeline parallel ranks pass on, for one optimizer step."""
    tokens = step.batch * step.sequence * step.accumulation
    layers = shape.layers / step.pipeline
    states = 2 * tokens / step.context * shape.hidden  # bytes of what goes from layer to layer
    times = 6 if step.checkpointing else 4  # all-reduces of a layer, each of which passes on twice
    seconds = Band(0, 0, 0)
    if step.tensor > 1:
        seconds = seconds.plus(_over(step.tensor, pool, 2 * times * states * layers))
    if step.context > 1:
        keys = 12 * tokens * shape.keys / step.tensor * layers
        seconds = seconds.plus(_over(step.context, pool, keys, apart=step.tensor))
    if step.pipeline > 1:
        apart = step.tensor * step.context * max(1, step.shards)
        seconds = seconds.plus(_over(2, pool, 4 * states, apart=apart))
    return seconds
