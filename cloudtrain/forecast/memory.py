"""Memory of one training step on one GPU: allocated bytes by term, by arithmetic.

Counted against torch's own account of the shared trainer's step (tests/forecast/oracle.py): each term was read off how
the account changes with one size. N are tokens of a micro-batch, h, f, q, k widths, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloudtrain.forecast import adapters
from cloudtrain.forecast.models import FAMILIES, Shape

CHUNK = 1 << 25  # logits of a chunk at most: LOGITS of entrypoints/trainer/chunked_loss.py

# Bytes that a layer keeps of a token for the backward pass, as multiples of h, q, k and f; by precision.
_USUAL = {"no": (24, 8, 8, 16), "mixed": (26, 4, 4, 8), "bf16": (16, 4, 4, 8)}
_FALCON = {"no": (12, 16, 4, 8), "mixed": (8, 8, 2, 4), "bf16": (6, 8, 2, 4)}
_BERT = {"no": (16, 8, 8, 8), "mixed": (16, 4, 4, 4), "bf16": (8, 4, 4, 4)}
_KEPT: Mapping[str, Mapping[str, tuple[int, int, int, int]]] = {
    "qwen3": {"no": (24, 16, 16, 16), "mixed": (26, 10, 10, 8), "bf16": (16, 10, 10, 8)},
    "gemma": _USUAL | {"bf16": (20, 4, 4, 8)},
    "phi3": {"no": (24, 16, 8, 16), "mixed": (24, 4, 6, 8), "bf16": (20, 4, 6, 8)},
    "olmo": {"no": (16, 8, 8, 16), "mixed": (18, 4, 4, 8), "bf16": (12, 4, 4, 8)},
    "olmo2": {"no": (24, 16, 16, 16), "mixed": (26, 12, 12, 8), "bf16": (20, 12, 12, 8)},
    "gpt2": {"no": (20, 8, 4, 20), "mixed": (14, 4, 2, 10), "bf16": (10, 4, 2, 10)},
    "gemma2": {"no": (40, 8, 8, 16), "mixed": (42, 4, 4, 8), "bf16": (36, 4, 4, 8)},
    "gemma3_text": {"no": (40, 16, 16, 16), "mixed": (42, 12, 12, 8), "bf16": (36, 12, 12, 8)},
    "phi": {"no": (8, 8, 8, 20), "mixed": (12, 4, 6, 10), "bf16": (4, 4, 6, 10)},
    "gpt_neox": {"no": (12, 12, 12, 8), "mixed": (8, 6, 8, 4), "bf16": (6, 6, 8, 4)},
    "stablelm": {"no": (16, 8, 8, 16), "mixed": (18, 4, 6, 8), "bf16": (8, 4, 6, 8)},
    "bloom": {"no": (20, 4, 8, 8), "mixed": (14, 2, 4, 4), "bf16": (10, 2, 4, 4)},
    # both layers of a pair, with masks of dropout as a GPU keeps them
    "t5": {"no": (65, 24, 24, 18), "mixed": (67, 12, 12, 10), "bf16": (55, 12, 12, 10)},
    "t5_gated": {"no": (65, 24, 24, 58), "mixed": (71, 12, 12, 30), "bf16": (55, 12, 12, 30)},
    **dict.fromkeys(("falcon", "falcon_new"), _FALCON),
    **dict.fromkeys(("bert", "roberta", "distilbert", "vit"), _BERT),
}
# Bytes of a score of attention, in float32 and else: families that transformers has no other attention for.
_SCORES: Mapping[str, tuple[int, int]] = {"bloom": (4, 6), "gemma2": (8, 8)}


@dataclass(frozen=True)
class Step:
    """How a model is trained, as far as memory goes."""

    batch: int  # samples of a micro-batch on one rank
    sequence: int
    precision: str = "no"  # no, bf16, fp16 (both mixed), pure bf16, pure fp16
    checkpointing: bool = False
    strategy: str = "none"
    shards: int = 1  # ranks that divide what the strategy divides
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    accumulation: int = 1
    chunked: bool = True  # the loss is made in chunks
    lora: int = 0  # rank of an adapter, which is in float32 in every precision; 0: the whole model is trained
    targets: tuple[str, ...] = ()  # modules with an adapter, as peft has them; none: its default
    lora_dropout: float = 0.0
    quantized: str = ""  # the frozen layers: 4bit, 8bit
    optimizer: str = "adamw"
    eager_attention: bool = False
    offload: bool = False


@dataclass(frozen=True)
class Estimate:
    """Allocated bytes of one rank at their highest, by term, and where in the step that is."""

    terms: Mapping[str, int]
    where: str
    # Weights, gradients and optimizer, which are on the GPU together at the update, as far as it is known.
    least: int = 0
    host: int = 0  # bytes that offload keeps in the node's memory for this rank, at least

    @property
    def total(self) -> int:
        """All terms together, in bytes."""
        return sum(self.terms.values())


def estimate(shape: Shape, step: Step) -> Estimate:
    """Return the memory that one rank allocates at most."""
    moments = [_at_loss, _first_backward, _last_backward, _update]
    if step.strategy in ("fsdp", "hsdp", "zero3"):
        moments += [_second_backward, _second_done, _gathering, _embedding, _root_reduced]
    sizes = _Sizes(shape, step)
    found = [(moment.__name__.strip("_").replace("_", " "), moment(sizes)) for moment in moments]
    where, terms = max(found, key=lambda item: sum(item[1].values()))
    # DeepSpeed stores weights in its own way, and offload moves a part that depends on the strategy.
    known = not step.offload and step.strategy in ("none", "ddp", "fsdp", "hsdp")
    whole = sizes.whole if step.strategy in ("zero1", "zero2") else 0
    least = sizes.weights + sizes.moments + sizes.gradients if known else whole
    return Estimate({name: int(size) for name, size in terms.items() if size >= 1}, where, int(least), int(sizes.host))


class _Sizes:
    """What the moments of a step are put together from, in bytes of one rank."""

    def __init__(self, shape: Shape, step: Step) -> None:
        self.shape, self.step = shape, step
        sharded = step.strategy in ("fsdp", "hsdp", "zero3")
        pure = step.precision.startswith("pure")
        self.stored = 2 if pure else 4  # bytes of a parameter at rest
        self.computed = 4 if step.precision == "no" else 2
        kind = "no" if self.computed == 4 else "bf16" if pure or sharded else "mixed"
        split = step.tensor * step.pipeline
        self.tokens = step.batch * step.sequence // step.context
        self.residual = 2 if kind == "bf16" else 4  # bytes of a number between layers
        self.layers = -(-shape.layers // step.pipeline)
        self.sharded = sharded
        # parameters
        count = shape.layers * shape.layer / split + shape.root / (step.tensor if step.pipeline == 1 else 1)
        adapter = adapters.parameters(shape, step.lora, step.targets) if step.lora else 0
        parts = step.shards if sharded else 1
        learned = 4 * adapter if step.lora else self.stored * count
        quantized = shape.layers * shape.linear_matrices / split if step.quantized else 0
        resting = self.stored * (count - quantized) + adapters.BITS.get(step.quantized, 0) * quantized
        self.weights = (resting + (learned if step.lora else 0)) / parts
        kept = adapters.moments(shape, adapter or count, learned, step.optimizer, adapter / max(1, step.lora))
        self.moments = kept / (step.shards if step.strategy != "ddp" else 1)
        self.gradients = learned / (step.shards if step.strategy in ("zero2", *_SHARDED) else 1)
        self.whole = self.weights if step.lora else self.computed * count  # what each rank of ZeRO-1 and 2 has
        self.host = 0.0
        if step.offload:  # FSDP and ZeRO-3 keep all on the CPU, ZeRO-1 and 2 the optimizer with its float32 weights
            # In the node, as deepspeed 0.19 has it (runtime/zero/stage3.py, stage_1_and_2.py): float32 weights, for ZeRO-3
            # their copies of 16 bits too.
            copies = 2 * count / parts if step.strategy == "zero3" and self.computed == 2 and not step.lora else 0
            own = self.weights + copies if sharded else 4 * (adapter or count) / step.shards
            self.host = own + self.moments + (0 if step.strategy == "zero1" else self.gradients)
            self.moments = 0
            self.weights = 0 if sharded else self.whole
            self.gradients = self.gradients if step.strategy == "zero1" else 0
        self.layer = shape.layer / step.tensor
        self.root = shape.root
        self.head = shape.embedding
        self.learns = not step.lora
        # activations
        each_width, kind_of = _KEPT.get(shape.family, _USUAL)[kind], FAMILIES[shape.family]
        if step.lora:  # frozen matrices and norms keep no inputs
            h, q, k, f = each_width
            less = self.computed if shape.family == "qwen3" else 0
            each_width = (min(h, 8 * kind_of.feeds), q - less, k - less, f * 3 // 4)
        widths = (shape.hidden, shape.queries / step.tensor, shape.keys / step.tensor,
                  (shape.active * shape.inner + shape.shared) / step.tensor)  # fmt: skip
        heads, normed = shape.heads / step.tensor, shape.family in ("qwen3", "gemma3_text")
        small = 4 * heads + 8 + (4 * (shape.heads + shape.keys * shape.heads / shape.queries) if normed else 0)
        attention = 2 * self.computed * heads * step.sequence if step.eager_attention else 0
        if shape.family in _SCORES:
            attention = _SCORES[shape.family][self.computed == 2] * heads * step.sequence
        each = sum(bytes_ * width for bytes_, width in zip(each_width, widths, strict=True)) + small + attention
        each += self._adapted(kind)
        cast = (shape.layer_matrices - shape.linear_matrices * bool(step.quantized)) / step.tensor
        cast += adapter / shape.layers
        self.casts = 2 * cast if kind == "mixed" else 0
        relative = 2 * self.computed * heads * step.sequence**2 if kind_of.attentions > 1 else 0  # one for all samples
        self.layer_kept = self.tokens * each + self.casts + relative
        states = self.tokens * self.residual * shape.hidden * kind_of.feeds
        self.between = states if step.checkpointing else self.layer_kept
        rotary = 0 if shape.positions else 2 * self.residual * (shape.queries // shape.heads) * step.sequence
        self.inputs = 16 * self.tokens + rotary
        rest = {"no": 8, "mixed": 8, "bf16": 6}[kind]
        self.norm = self.tokens * rest * shape.hidden
        self.in_layer = self.tokens * 2 * self.computed * widths[3] + self.computed * shape.hidden * widths[3]
        self.flow = self.tokens * self.residual * shape.hidden  # the gradient that goes from layer to layer
        # gradients that are there before a step's last backward pass
        self.earlier = self.gradients if step.accumulation > 1 or step.strategy == "ddp" else 0

    def _adapted(self, kind: str) -> float:
        """Bytes of a token that a layer's adapters keep: their inputs, a mask of dropout, and what is between their two."""
        step, bytes_ = self.step, 2 if kind == "mixed" else 4
        found = adapters.targets(self.shape, step.targets) if step.lora else ()
        return sum(inputs * (bytes_ + (step.lora_dropout > 0)) + bytes_ * step.lora for _, inputs, _ in found)

    @property
    def states(self) -> dict[str, float]:
        weights = "weights" if self.learns else f"weights (frozen, {'bfloat16' if self.stored == 2 else 'float32'})"
        return {weights: self.weights, "optimizer": self.moments, "inputs": self.inputs}

    def gathered(self, layers: int) -> float:
        """What FSDP has gathered: the root group and some layers."""
        return self.computed * (self.root + layers * self.layer) if self.sharded else 0

    @property
    def layer_gradients(self) -> float:
        return max(self.earlier, self.gradients - self.stored * self.root / self.step.shards * self.learns)

    @property
    def head_gradient(self) -> float:
        width = self.computed if self.sharded else self.stored
        return width * self.head if self.learns and self.step.pipeline == 1 else 0


_SHARDED = ("fsdp", "hsdp", "zero3")


def _at_loss(s: _Sizes) -> dict[str, float]:
    vocabulary, hidden = s.shape.vocabulary, s.shape.hidden
    if s.step.chunked:
        logits = min(s.tokens * vocabulary, max(CHUNK, vocabulary))
        weight = 4 * s.head * s.learns + (
            s.computed * s.head if s.computed == 2 and not s.sharded and s.stored == 4 else 0
        )
        product = s.computed * s.head
        loss: float = weight + max((6 if s.computed == 2 else 4) * logits, s.computed * logits + product)
        loss += s.tokens * 2 * s.residual * hidden + (
            2 * hidden * logits / vocabulary if s.residual != s.computed else 0
        )
    else:
        loss = 12 * s.tokens * vocabulary + s.tokens * s.computed * hidden
        loss += s.computed * s.head if s.casts else 0
    return {
        **s.states, "gradients": s.earlier, "activations": s.layers * s.between + s.norm, "loss": loss,
        "gathered": s.gathered(1),
    }  # fmt: skip


def _first_backward(s: _Sizes) -> dict[str, float]:
    """The last layer, which comes first."""
    kept = s.layers * s.between + (s.layer_kept if s.step.checkpointing else 0)
    final = s.tokens * 24 * s.shape.hidden if not s.step.checkpointing else 0
    buffers = max(final, s.in_layer + (0 if s.step.checkpointing and s.residual == 4 else s.flow))
    gradients = s.earlier + s.head_gradient
    return {**s.states, "gradients": gradients, "activations": kept, "buffers": buffers, "gathered": s.gathered(2)}


def _last_backward(s: _Sizes) -> dict[str, float]:
    """The first layer, which comes last: the gradients of all others are there."""
    alone = 0 if s.shape.tied else s.head  # its gradient comes after this
    gradients = max(s.earlier, s.gradients - s.stored * (s.layer + alone) / s.step.shards * s.learns)
    return {
        **s.states, "gradients": gradients, "activations": s.layer_kept, "buffers": s.in_layer + s.flow,
        "gathered": s.gathered(1) + s.computed * s.head if s.sharded else 0,
    }  # fmt: skip


def _update(s: _Sizes) -> dict[str, float]:
    """The embedding's gradient is added to the head's; then the optimizer works in place."""
    both = 2 * s.stored * s.head if s.shape.tied and not s.sharded and s.learns else 0
    return {**s.states, "gradients": s.gradients, "buffers": both}


def _second_backward(s: _Sizes) -> dict[str, float]:
    """FSDP: the layer before is reduced while the next is computed."""
    terms = _first_backward(s)
    terms["activations"] -= s.between
    terms["buffers"] = s.in_layer + s.flow + 4 * s.layer
    return terms


def _second_done(s: _Sizes) -> dict[str, float]:
    terms = _second_backward(s)
    terms["activations"] -= s.layer_kept if s.layers > 1 else 0
    terms["buffers"] = 4 * s.layer + s.computed * s.layer + s.flow
    return terms


def _gathering(s: _Sizes) -> dict[str, float]:
    """FSDP: what arrives is copied into place, at the start of a forward pass."""
    return {**s.states, "gradients": s.earlier, "gathered": 2 * s.gathered(1)}


def _embedding(s: _Sizes) -> dict[str, float]:
    """FSDP: the embedding's gradient, beside that of the head, and their sum where they are one matrix."""
    buffers = (3 if s.shape.tied else 2) * s.computed * s.head * s.learns + 4 * s.layer
    return {**s.states, "gradients": s.layer_gradients, "buffers": buffers, "gathered": s.gathered(0)}


def _root_reduced(s: _Sizes) -> dict[str, float]:
    """FSDP: the root group's gradients on their way to their shards."""
    buffers = (4 + s.computed) * s.root * s.learns
    return {**s.states, "gradients": s.layer_gradients, "buffers": buffers}
