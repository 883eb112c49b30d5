"""How long a training takes and what it costs, before it runs: the time of its steps, start, evaluations and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cloudtrain.forecast import adapters, devices, speed
from cloudtrain.forecast.models import FAMILIES
from cloudtrain.forecast.network import GB, Band, pool
from cloudtrain.forecast.training import Length
from cloudtrain.job.units import HOUR_S, format_duration
from cloudtrain.source.imports import Imports
from cloudtrain.source.texts import Texts

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.forecast.network import Pool
    from cloudtrain.forecast.training import Training
    from cloudtrain.job.job import Job

# Image, packages, model and data, until the first step; waiting for machines is in no figure. Opinion.
START_S = Band(60, 240, 900)
# Bytes per second of one node to the checkpoint's folder, as far as training waits for it. Opinion.
_SAVED = Band(1 * GB, 10 * GB, float("inf"))
LEAST = 0.1e9  # parameters: published trainings have more
_FUSED = re.compile(
    r"\btorch\.compile\(|\b(?:from|import) (?:apex|flash_attn|liger_kernel|megatron|transformer_engine|unsloth)\b"
    r"|\b(?:torch_compile|use_liger_kernel)[\"']? ?[=:] ?True\b"
)
_NEURON, _TPU = re.compile(r"(?i)trn|trainium|inf\d|inferentia"), re.compile(r"(?i)tpu|v\d[ep]?(?:-|$)")
_SCRIPTS = {"eager": " of eager scripts", "fused": " of compiled or fused scripts"}


def program(source: Texts) -> str:
    """Return what kind of program a script's source is, as `speed.PROGRAMS` has it; blocking."""
    if not source.find(_FUSED):
        return "eager"
    imports = Imports(source) if source.entry else None
    if imports is None or imports.unknown:
        return "fused"
    return "fused" if Texts(source.root, imports.importers).find(_FUSED) else "eager"


def forecast(found: Training, job: Job, plan: Plan, source: Texts, machine: str = "") -> dict[str, Any]:
    """Return how long a training takes, as `Plan.time` has it.

    Args:
        found: what the job says of it.
        job: a resolved job.
        plan: its plan, with the number of nodes and the price of all of them.
        source: what it runs.
        machine: type of a node as provider/region/name; "" where it is not known.

    Returns:
        `line`, and where it is known `seconds` and `step_s` (10, 50 and 90 %), `tokens` of a step, `steps` and `usd` (from,
        to).
    """
    gpu = devices.named(job.resources.accelerator or "", speed.MFU)
    if why := next(_unknown(found, gpu, job.resources.accelerator or ""), ""):
        return {"line": f"unknown: {why}"}
    length, nodes = found.length, plan.main_nodes
    assert gpu and isinstance(length, Length)
    machines = pool(gpu, nodes, int(plan.manifest["processes_per_node"]), machine)
    compiled = "torch_compile" in found.open  # by the shared trainer
    kind = ("fused" if compiled else "trainer") if job.trainer else program(source)
    made = speed.of_step(found.shape, found.step, machines, found.ranks, program=kind)
    if made is None:
        return {"line": "unknown: cloudtrain does not know the network between these nodes"}
    if not made.busy:
        return {"line": "unknown: cloudtrain has no reference trainings with so small a micro-batch"}
    steps = Band(*(length.steps * each for each in made.step))
    whole = START_S.plus(steps).plus(_evaluations(found, length, made)).plus(_saved(found, machines, length, steps))
    line = f"{format_duration(whole.low)} to {format_duration(whole.high)}"
    usd = None
    if plan.price:
        on_demand = plan.price["usd_per_hour"]
        low, high = (job.resources.use_spot and plan.price.get("spot")) or (on_demand, on_demand)
        usd = [round(whole.low / HOUR_S * float(low), 2), round(whole.high / HOUR_S * float(high), 2)]
        line += f", {usd[0]:.2f} to {usd[1]:.2f} USD"
    slow, fast = (made.tokens / seconds for seconds in (made.step.high, made.step.low))
    like = "" if job.trainer else _SCRIPTS[kind]
    line += f" (p10 to p90{like}; {length.steps:,} steps at {slow:,.0f} to {fast:,.0f} tokens/s)"
    line += f"; without {length.without}" if length.without else ""
    if whole.middle > job.limits.max_runtime_s:
        line += f"; limits.max_runtime ends an attempt after {format_duration(job.limits.max_runtime_s)}"
    return {
        "line": line, "seconds": [round(each) for each in whole], "step_s": list(made.step), "steps": length.steps,
        "tokens": made.tokens, "usd": usd,
    }  # fmt: skip


def _unknown(found: Training, gpu: str | None, accelerator: str) -> Iterator[str]:
    """Yield why nothing can be said of a training's time."""
    step = found.step
    if isinstance(found.length, str):
        yield found.length
    if gpu is None:
        yield _why_silent(accelerator)
    half = "bf16" if gpu is None or devices.has_bf16(gpu) else "fp16"
    if step.precision.removeprefix("pure ") != half:
        yield f"cloudtrain has reference trainings in {half} only"
    silent = (
        (step.offload, "offload"),
        (step.eager_attention, "eager attention"),
        (step.quantized == "8bit", "8-bit weights"),
        (step.optimizer == "muon", "Muon"),
        (FAMILIES[found.shape.family].attentions > 1, "an encoder and a decoder"),
        (found.shape.family == "vit", "images"),
    )
    for named, text in silent:
        if named:
            yield f"no published training with {text} was found to compare with"
    if found.shape.parameters < LEAST:
        yield "cloudtrain has no reference trainings of models below 0.1 billion parameters"


def _why_silent(accelerator: str) -> str:
    """Return why nothing is known of the speed of an accelerator that no published training is known of."""
    if compiler := "Neuron's" if _NEURON.match(accelerator) else "XLA's" if _TPU.match(accelerator) else "":
        return (
            f"on {accelerator} {compiler} compiler decides how fast a model is, and no figures of this launcher exist"
        )
    return f"no published training on {accelerator} with its model, batch and time was found"


def _evaluations(found: Training, length: Length, made: speed.Speed) -> Band:
    """Return the seconds of all evaluations: a third of the work of training on as many tokens."""
    share = length.evaluations * length.eval_samples * found.step.sequence / made.tokens / 3
    return Band(*(share * each for each in made.step))


def _saved(found: Training, machines: Pool, length: Length, steps: Band) -> Band:
    """Return the seconds in which training waits for checkpoints: weights and two moments."""
    step = found.step
    sharded = step.strategy not in ("none", "ddp")
    saved = (6 if step.precision == "pure bf16" else 12) * found.shape.parameters
    if step.lora:
        saved = 12 * adapters.parameters(found.shape, step.lora, step.targets)
    bytes_ = saved / (machines.nodes if sharded else 1)
    if length.save_steps:
        counts = [length.steps / length.save_steps] * 3
    else:
        counts = [each / length.save_s if length.save_s else 0 for each in steps]
    return Band(*((1 + count) * bytes_ / rate for count, rate in zip(counts, reversed(_SAVED), strict=True)))
