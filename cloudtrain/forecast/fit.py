"""Does a training fit on its GPUs: fits, probably, perhaps or not, with a band and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cloudtrain.forecast import devices, training
from cloudtrain.forecast.memory import estimate

if TYPE_CHECKING:
    from cloudtrain.forecast.training import Training

GIB = 1 << 30
FITS, NOT, PERHAPS = "fits", "does not fit", "may not fit"
PROBABLY = "probably fits"  # the whole band is below the GPU's memory, but a part of it was never measured
# Needed memory over the arithmetic: its own error below, to which tests/forecast/test_memory.py holds it, the allocator's
# slack and the CUDA context above (docs/fit.md).
LOW, HIGH, CONTEXT = 0.97, 1.25, 2 * GIB
MOST_GPUS = 512  # that are tried for what fits
LORA = 16  # rank of an adapter: the trainer's default
UNMEASURED = (0.7, 1.5)  # what the arithmetic of all but weights, gradients and optimizer may be off by, never compared


@dataclass(frozen=True)
class Fit:
    """The answer for one kind of GPU, in bytes of one GPU."""

    answer: str
    gpu: str
    memory: int | None  # of the GPU as the driver reports it; None: not known
    low: int
    high: int
    terms: Mapping[str, int]  # allocated memory
    where: str  # in a step it is highest
    open: tuple[str, ...]  # why the band is wider
    changes: tuple[tuple[str, int, int], ...] = ()  # what would need less: text, from and to
    host: int = 0  # bytes that offload keeps in a node's memory, at least
    host_memory: int | None = None  # of a node; None: not known

    @property
    def line(self) -> str:
        """The answer in one line."""
        size = f"{self.memory / GIB:.1f} GiB" if self.memory else "of unknown memory"
        needs = f"needs {_band(self.low, self.high)} of each {self.gpu} ({size})"
        why = "not certain, since this was never measured" if self.answer == PROBABLY else "never measured"
        host = f" of {self.host_memory / GIB:.1f} GiB" if self.host_memory else ", whose size is not known"
        return (
            f"{self.answer}: {needs}"
            + (f"; offload keeps {self.host / GIB:.1f} GiB or more in each node's memory{host}" if self.host else "")
            + (f"; {why}: {', '.join(self.open)}" if self.open else "")
        )

    @property
    def hint(self) -> str:
        """What would need less, in one sentence; "" where nothing is known."""
        return "; ".join(f"{text} needs {_band(low, high)}" for text, low, high in self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, as a plan and `--json` have it."""
        lists = {"open": list(self.open), "changes": [list(change) for change in self.changes]}
        return asdict(self) | lists | {"line": self.line}


def answer(found: Training, gpu: str, ranks: int = 1, host_memory: int | None = None) -> Fit:
    """Return whether a training fits on a kind of GPU, and what it offloads in its node.

    Args:
        found: the training.
        gpu: its kind, as in a job file.
        ranks: of a node.
        host_memory: bytes of a node; None: not known.
    """
    memory = devices.size_bytes(gpu)
    lacks = not devices.has_bf16(gpu)
    half = "fp16" if lacks and "quantized" in found.names else "bf16"  # the shared trainer has no fp16 with FSDP
    if lacks and "bf16" in found.step.precision:
        found = replace(found, open=(*found.open, f"bfloat16, which {gpu} does not have"))
    made = estimate(found.shape, found.step)
    low, high = needed(found)
    verdict = PERHAPS
    if memory and high <= memory:
        verdict = PROBABLY if found.open else FITS
    elif memory and (made.least if found.open else low) > memory:
        verdict = NOT
    host = made.host * ranks
    if host_memory and host > host_memory:
        verdict = NOT
    changes = () if verdict == FITS else tuple(_changes(found, high, half))
    if memory and all(most > memory for _, _, most in changes) and verdict in (PERHAPS, NOT):
        changes += tuple(_enough(found, gpu, memory, half))
    return Fit(verdict, gpu, memory, low, high, made.terms, made.where, found.open, changes, host, host_memory)


def needed(found: Training) -> tuple[int, int]:
    """Return from what to what a GPU needs, in bytes."""
    made = estimate(found.shape, found.step)
    total = made.total
    low, high = UNMEASURED if found.open else (LOW, 1.0)
    shape, step = found.shape, found.step
    # Counted: not where a part of the model is left out, nor where parts of it are of different sizes.
    counted = (
        not shape.special
        and step.tensor * step.pipeline == 1
        and not (step.quantized and (shape.experts or step.quantized == "8bit"))
    )
    known = min(made.least, total) if counted else 0
    return max(int(total * low), made.least), int((known + (total - known) * high) * HIGH) + CONTEXT


def _named(found: Training, name: str, half: str) -> str:
    """Return how a change is written, in the kind of numbers of 16 bits that the GPU has."""
    text = found.names[name]
    return text if half == "bf16" else text.replace("bf16", half).replace("bfloat16", "float16")


def _changes(found: Training, high: int, half: str) -> Iterator[tuple[str, int, int]]:
    """Yield what would need less, the strongest last."""
    step = found.step
    names = found.names
    tried = []
    if step.precision == "no":
        tried.append((_named(found, "bf16", half), replace(step, precision=half)))
    if step.lora and "dtype" in names and step.precision in ("no", "bf16", "fp16"):
        tried.append((_named(found, "dtype", half), replace(step, precision=f"pure {half}")))
    if step.batch > 1:
        smaller = replace(step, batch=step.batch // 2, accumulation=step.accumulation * 2)
        tried.append((f"{names['batch']}: {smaller.batch}, twice the accumulation", smaller))
    if not step.checkpointing:
        tried.append((names["checkpointing"], replace(step, checkpointing=True)))
    if step.strategy in ("ddp", "zero1", "zero2") and found.ranks > 1:
        tried.append(("parallelism.strategy: fsdp", replace(step, strategy="fsdp", shards=found.ranks)))
    elif step.strategy == "fsdp":
        tried.append(("twice the GPUs", replace(step, shards=step.shards * 2)))
    for text, other in tried:
        least = needed(replace(found, step=other))
        if least[1] < high:
            yield (text, *least)


def _enough(found: Training, gpu: str, memory: int, half: str) -> Iterator[tuple[str, int, int]]:
    """Yield what fits where no single change does: LoRA on one GPU, and the fewest GPUs of the type with FSDP."""
    step, names = found.step, found.names
    if step.tensor * step.pipeline * step.context > 1:
        return
    precision = half if step.precision == "no" else step.precision
    less = replace(step, precision=precision, checkpointing=True, strategy="none", shards=1, offload=False)
    texts = [_named(found, "bf16", half)] * (precision != step.precision) + [names["checkpointing"]] * (
        not step.checkpointing
    )
    texts += ["parallelism.offload: false"] * step.offload
    if "peft" in names and not step.lora:
        tried = [(precision, "", []), (f"pure {half}", "", [_named(found, "dtype", half)])]
        tried += [(precision, "4bit", [names["quantized"]])] if "quantized" in names else []
        for kept, quantized, more in tried:
            other = replace(less, lora=LORA, precision=kept, quantized=quantized)
            least = needed(training.changed(found, other, 1))
            if least[1] <= memory:
                yield (f"fits: {gpu} x 1 with {', '.join([*texts, names['peft'], *more])}", *least)
                break
    single = replace(less, batch=1, accumulation=step.accumulation * step.batch)
    smaller = [f"{names['batch']}: 1, {step.batch} times the accumulation"]
    for batched, more in ((less, []), (single, smaller))[: 1 + (step.batch > 1)]:
        for count in (1 << power for power in range(MOST_GPUS.bit_length())):
            strategy = ["parallelism.strategy: fsdp"] if count > 1 else []
            other = replace(batched, strategy="fsdp", shards=count) if count > 1 else batched
            least = needed(training.changed(found, other, count))
            if least[1] <= memory:
                yield (f"fits: {gpu} x {count} with {', '.join([*texts, *more, *strategy])}", *least)
                return


def _band(low: int, high: int) -> str:
    return f"{low / GIB:.1f} to {high / GIB:.1f} GiB"
