"""What a job says of its training, as far as memory goes: the shared trainer's arguments, or a script's `fit` section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadJob, Problem
from cloudtrain.forecast.memory import Step
from cloudtrain.forecast.models import FAMILIES, FROM_SCRATCH, Shape, find
from cloudtrain.source.node_code import module

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

# Held against torch's own account, with dropout 0, in one process and under FSDP (tests/forecast).
MEASURED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo", "olmo2")
ADAPTED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3")  # likewise, with an adapter
LORA_DROPOUT = 0.05  # of a script, as of the shared trainer
MOST = 10**15  # of any number that is multiplied
_TRAINER = {
    "bf16": "bf16: true", "batch": "per_device_train_batch_size", "checkpointing": "gradient_checkpointing: true",
    "peft": "use_peft: true", "dtype": "dtype: bfloat16",
}  # fmt: skip
_OWN = {
    "bf16": "bfloat16", "batch": "fit.batch", "checkpointing": "gradient checkpointing", "peft": "LoRA (fit.lora: 16)",
    "dtype": "fit.precision: bf16-pure", "quantized": "fit.quantized: 4bit",
}  # fmt: skip
_OWN_PRECISION = {"fp32": "no", "bf16-pure": "pure bf16", "fp16-pure": "pure fp16"}


@dataclass(frozen=True)
class Length:
    """How much is trained and done beside."""

    steps: int
    save_steps: int | None = None  # between checkpoints
    save_s: float | None = None  # the same in seconds
    evaluations: int = 0
    eval_samples: int = 0
    without: str = ""  # what of it is not known, and so in no time


@dataclass(frozen=True)
class Training:
    """A model and how it is trained."""

    shape: Shape
    step: Step
    ranks: int  # that take samples of their own
    open: tuple[str, ...]  # what of it was never compared with a measurement
    names: Mapping[str, str]  # how the job's owner writes a change
    length: Length | str  # why it is not known
    samples: int  # of an optimizer step, of all ranks


def of_job(job: Job, parallelism: Mapping[str, Any], world: int, nodes: int) -> Training | str | None:
    """Return a job's training, why it is not known, or None where the job says nothing of it.

    Raises BadJob where the shared trainer would refuse the arguments or the layout.
    """
    if job.trainer:
        return _of_trainer(job, parallelism, world, nodes)
    return _of_script(job, parallelism, world) if job.fit.model else None


def _of_trainer(job: Job, parallelism: Mapping[str, Any], world: int, nodes: int) -> Training | str:
    if parallelism.get("accelerate_config"):
        return "the Accelerate file is read on the node only"
    if wrong := module("trainer.preview").problems(job.argv()[1:], parallelism, world, nodes):
        raise BadJob(job.located([Problem(sentence, "hyperparameters") for sentence in wrong]))
    arguments = module("trainer.arguments").parse(job.argv()[1:])
    if arguments.own_task:
        return f"the model is known on the node only: {arguments.task}"
    plan = module("trainer.strategies.mesh").choose_plan(parallelism, world, nodes)
    shape = _pretrained(arguments.model, job) if arguments.model else _from_scratch(arguments, job)
    if isinstance(shape, str):
        return shape
    if FAMILIES[shape.family].attentions > 1 or shape.family == "vit":  # only scripts train them
        return f"models of type {shape.family} are not supported"
    sizes = [value for value in vars(arguments).values() if isinstance(value, int)]
    if max(*sizes, shape.parameters) > MOST:
        return "a number of the arguments is too large for a forecast"
    per_rank = arguments.per_device_train_batch_size
    samples = arguments.global_batch_size
    if arguments.global_batch_tokens > 0:
        samples = arguments.global_batch_tokens // arguments.block_size
    pieces = samples // (per_rank * plan.data_ranks) if samples > 0 else arguments.gradient_accumulation_steps
    whole = samples if samples > 0 else per_rank * pieces * plan.data_ranks
    step = Step(
        batch=per_rank,
        sequence=arguments.block_size * arguments.kind.sequences,  # of preferences a chosen and a rejected answer
        precision=_precision(arguments, plan.carrier),
        checkpointing=arguments.gradient_checkpointing,
        strategy=plan.strategy,
        shards=plan.parts,
        tensor=plan.tensor,
        pipeline=plan.pipeline,
        context=plan.context,
        accumulation=max(1, pieces),
        chunked=plan.tensor * plan.pipeline == 1 and not arguments.torch_compile and arguments.writes and not arguments.own_loss
        and shape.family not in ("bert", "roberta", "distilbert"),
        lora=arguments.lora_r if arguments.use_peft else 0,
        targets=tuple(arguments.lora_target_modules),
        lora_dropout=arguments.lora_dropout,
        eager_attention=arguments.attn_implementation == "eager",
        offload=plan.offload,
    )  # fmt: skip
    dropout = shape.dropout if arguments.model or arguments.dropout < 0 else arguments.dropout
    more = [
        (not arguments.kind.equal_lengths, arguments.task),
        (arguments.torch_compile, "torch_compile"),
        (arguments.optim != "adamw_torch_fused", arguments.optim),
    ]
    reasons = [*_open(shape, step, dropout), *(text for wrong, text in more if wrong)]
    return Training(shape, step, plan.data_ranks, tuple(reasons), _TRAINER, _length(arguments, job), whole)


def _precision(arguments: Any, carrier: str) -> str:
    """Return how numbers are kept and computed, as `Step` has it."""
    # DeepSpeed keeps float32 copies of what it trains.
    if arguments.dtype == "float32" or (carrier == "deepspeed" and not arguments.use_peft):
        return str(arguments.mixed_precision)
    return "pure bf16"


def _length(arguments: Any, job: Job) -> Length | str:
    """Return how much the shared trainer does, or why that is not known before it runs."""
    if not arguments.kind.equal_lengths:
        return f"samples of {arguments.task} differ in length"
    steps = arguments.max_steps
    if steps < 0:
        return "the number of steps is known on the node only (set max_steps)"
    counts = 1 + int(arguments.eval_on_start)
    every = arguments.eval_steps if arguments.eval_steps > 0 else arguments.logging_steps
    counts += steps // every if arguments.eval_strategy == "steps" else 0
    sized = arguments.max_eval_samples > 0 and arguments.eval_strategy != "epoch"
    return Length(
        steps,
        arguments.save_steps if arguments.save_steps > 0 else job.checkpoint.every_steps,
        None if arguments.save_steps > 0 else job.checkpoint.every_s,
        counts if sized else 0,
        arguments.max_eval_samples if sized else 0,
        "" if sized or (arguments.validation_split_percentage == 0 and not arguments.eval_dataset) else "evaluations",
    )


def _of_script(job: Job, parallelism: Mapping[str, Any], world: int) -> Training | str:
    """Return what a script's owner says of it: its model as transformers has it, AdamW, whole logits."""
    said = job.fit
    assert said.model and said.batch and said.sequence, "fit needs model, batch and sequence"
    shape = _pretrained(said.model, job)
    if isinstance(shape, str):
        return shape
    split = {key: int(parallelism.get(f"{key}_size") or 1) for key in ("tp", "pp", "cp")}
    ranks = max(1, world // (split["tp"] * split["pp"] * split["cp"]))
    strategy = str(parallelism.get("strategy") or "none")
    shards = int(parallelism.get("dp_shard_size") or ranks) if strategy not in ("none", "ddp") else 1
    step = Step(
        said.batch, said.sequence, _OWN_PRECISION.get(said.precision, said.precision),
        said.checkpointing, strategy, shards, split["tp"], split["pp"], split["cp"], said.accumulation,
        chunked=False, lora=said.lora or 0, targets=tuple(said.lora_targets), lora_dropout=LORA_DROPOUT,
        quantized=said.quantized or "", optimizer=said.optimizer, offload=bool(parallelism.get("offload")),
    )  # fmt: skip
    length = Length(said.steps, without="evaluations and checkpoints") if said.steps else "fit.steps is not set"
    return Training(shape, step, ranks, tuple(_open(shape, step, shape.dropout)), _OWN, length, said.batch * ranks)


def spread(found: Training, step: Step, ranks: int) -> Training:
    """Return a training of one process, or with ddp, spread in another way."""
    reasons = dict.fromkeys((*found.open, *_open(found.shape, step, 0.0)))
    return replace(found, step=step, ranks=ranks, open=tuple(reasons))


def changed(found: Training, step: Step, ranks: int) -> Training:
    """Return a training with another step: what was never compared with a measurement is that of the new one."""
    before = set(_open(found.shape, found.step, 0.0))
    reasons = dict.fromkeys((*(why for why in found.open if why not in before), *_open(found.shape, step, 0.0)))
    return replace(found, step=step, ranks=ranks, open=tuple(reasons))


def _open(shape: Shape, step: Step, dropout: float) -> Iterator[str]:
    """Yield what of a training was never compared with a measurement."""
    grouped, sharded = shape.keys != shape.queries, step.strategy not in ("none", "ddp")
    reasons = (
        (shape.family not in MEASURED, shape.family),
        (bool(shape.special), shape.special),
        (dropout > 0, f"dropout {dropout:g}"),
        (step.strategy not in ("none", "ddp", "fsdp"), step.strategy),
        (step.tensor > 1, f"tp_size {step.tensor}"),
        (step.pipeline > 1, f"pp_size {step.pipeline}"),
        (step.context > 1, f"cp_size {step.context}"),
        (step.offload, "offload"),
        (step.lora > 0 and shape.family not in ADAPTED, "LoRA"),
        (step.lora > 0 and step.precision == "no", "LoRA in float32"),
        (step.lora > 0 and sharded, "LoRA with FSDP"),
        (step.quantized == "8bit", "8-bit weights"),
        (bool(step.quantized and shape.experts), "experts, which bitsandbytes does not quantize in transformers 5"),
        (step.eager_attention, "eager attention"),
        ("fp16" in step.precision, "fp16"),
        (step.precision == "no" and grouped, "grouped heads in float32"),
        (0 < shape.window < step.sequence, f"a window of {shape.window} tokens"),
    )
    return (text for wrong, text in reasons if wrong)


def _pretrained(name: str, job: Job) -> Shape | str:
    """Return the sizes of a model that a job names, or why they are not known."""
    if name.startswith("input:"):
        place = job.inputs.get(name.removeprefix("input:"))
        if place is None or "://" in place.uri:
            return f"the model {name} is not on this machine"
        name = place.uri
    return find(name, Path(job.source))


def _from_scratch(arguments: Any, job: Job) -> Shape | str:
    """Return the sizes that the arguments give, as entrypoints/trainer/model.py does."""
    kind = FROM_SCRATCH.get(arguments.model_type)
    if kind is None:
        return f"models of type {arguments.model_type} are not supported"
    tokenizer = arguments.tokenizer or "bpe:4096"
    if tokenizer.startswith("bpe:"):
        words = tokenizer.removeprefix("bpe:")
        if not words.isdecimal() or not int(words):
            return f"the size of the tokenizer {tokenizer} is unknown: write bpe:4096"
        vocabulary = int(words)
    else:
        like = _pretrained(tokenizer, job)
        if isinstance(like, str):
            return f"the size of the tokenizer {tokenizer} is unknown on this machine"
        vocabulary = like.vocabulary
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    inner = arguments.intermediate_size
    if inner < 0:
        inner = 64 * round(hidden * 8 / 3 / 64) if kind.gated and arguments.model_type != "olmo2" else 4 * hidden
    width = kind.head_dim or hidden // heads
    own = arguments.num_key_value_heads
    return Shape(
        arguments.model_type, hidden, inner, arguments.num_hidden_layers, heads, heads * width,
        (own if own > 0 and kind.gated else heads) * width, vocabulary, arguments.tie_word_embeddings,
        arguments.block_size if kind.learned_positions else 0, kind.dropout,
    )  # fmt: skip
