"""Prepare a task's data: tokenizer, training samples, held-out samples, classes.

causal-lm                 all text in one stream, cut into blocks; at hand, or read as it comes (stream.py)
chat                      conversations through a chat template, answers are learned (chat.py)
sequence-classification   one text with one label a sample, padded to the longest of a batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import default_collate

from .. import collectives
from .. import model as models
from ..errors import Unsupported
from ..labels import IGNORED
from . import chat
from . import tokenizer as tokenizers
from .documents import Columns, Document, hold_out, load, stream, take
from .samples import Blocks, Item, Rows, packed, padded
from .stream import StreamBatches, Texts

if TYPE_CHECKING:
    from ..arguments import Arguments

DEFAULT_TOKENIZER = "bpe:4096"
FIRST_BYTES = 1 << 26  # of a stream, for a tokenizer that is trained on it


Samples = Any  # Blocks, Rows, Turns; a stream's Texts, which have no length


@dataclass
class Task:
    """Samples, what they are learned by, and what belongs to them; equal on every rank.

    The loss of this class is that of labels. What a rank has of the model, or of a sequence, is enough for it.
    """

    tokenizer: Any
    train: Samples
    held_out: Samples | None
    collate: Callable[[list[Item]], Item]
    labels: list[str] = field(default_factory=list)
    described: str = ""
    own_loss: ClassVar[bool] = False  # it needs the whole model, and whole samples
    unit: ClassVar[str] = "tokens"  # of `size`

    def model(self, arguments: Arguments) -> torch.nn.Module:
        """Return the model, the same on every rank."""
        return models.build(arguments, self.tokenizer, self.labels)

    def optimizer(self, model: torch.nn.Module, arguments: Arguments) -> torch.optim.Optimizer:
        """Return the optimizer of what is trained."""
        return models.optimizer(model, arguments)

    def prepared(self, model: Any) -> None:
        """Take the model as the strategy has wrapped it, before the first step."""

    def stream(self, **batching: Any) -> StreamBatches:
        """Return this rank's batches of a stream, `train`."""
        return StreamBatches(self.train, **batching)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Return the batch where the model is; the host does not wait for the copy."""
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def count(self, model: Any, batch: Any) -> torch.Tensor:
        """Return over how many labels the loss of a batch is the mean: ()."""
        return models.counted(batch["labels"]).sum()

    def size(self, batch: Any) -> torch.Tensor | int:
        """Return how many tokens a batch has, for the speed."""
        return models.length(batch)

    def losses(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the losses of a batch, which are summed and divided by the `count` of the global batch."""
        return models.losses(model(**models.inputs(batch)).logits, batch["labels"])

    def scores(self, model: Any, batch: Any) -> torch.Tensor:
        """Return numbers of an evaluation, in float64: a row for each sample, or one of all together."""
        return models.scored(model(**models.inputs(batch)).logits, batch["labels"])

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the results of an evaluation by name, made of the sums of all rows."""
        loss, count, right = sums
        results = {"eval_loss": loss / max(count, 1)}
        return results | {"eval_accuracy": right / max(count, 1)} if self.labels else results


def prepare(arguments: Arguments, inputs: Mapping[str, str]) -> Task:
    """Return the task with its samples; collective. Raises Unsupported when ranks would not see the same."""
    name = arguments.tokenizer or arguments.model or DEFAULT_TOKENIZER
    if arguments.streaming:
        return _stream(arguments, name, inputs)
    train, held_out = _documents(arguments, inputs)
    if arguments.task == "chat":
        tokenizer = tokenizers.load(name, chat.words(train))
        chat.furnish(tokenizer, arguments)
    else:
        tokenizer = tokenizers.load(name, take(train, arguments.max_train_bytes))
    make = {"causal-lm": _causal_lm, "chat": _chat, "sequence-classification": _classification}[arguments.task]
    task = make(arguments, tokenizer, train, held_out)
    if len(task.train) == 0:
        raise Unsupported("there is nothing to train on: the texts are empty")
    if task.held_out is not None and len(task.held_out) == 0:
        task.held_out = None
    collectives.check_same("training data", task.train.fingerprint())
    collectives.check_same("held-out data", task.held_out.fingerprint() if task.held_out is not None else "")
    return task


def _named(arguments: Arguments, inputs: Mapping[str, str]) -> tuple[list[str], list[str], Columns]:
    """Return the names of what is trained on and of what is held out, and the columns of both."""
    label = None if arguments.writes else arguments.label_column
    turns = arguments.task == "chat"
    text = arguments.messages_column if turns else arguments.text_column
    columns = Columns(text, label, turns, arguments.dataset_config, arguments.dataset_split)
    names = arguments.dataset or (["input:train"] if "train" in inputs else [])
    if not names:
        raise Unsupported("there is no --dataset and the job has no input named train")
    return names, arguments.eval_dataset or (["input:validation"] if "validation" in inputs else []), columns


def _documents(arguments: Arguments, inputs: Mapping[str, str]) -> tuple[list[Document], list[Document]]:
    names, other, columns = _named(arguments, inputs)
    documents = load(names, columns, inputs)
    if other:
        return documents, load(other, columns, inputs)
    return hold_out(documents, arguments.validation_split_percentage, whole=columns.turns)


def _stream(arguments: Arguments, name: str, inputs: Mapping[str, str]) -> Task:
    """Return the task of texts that are read as they come; its tokenizer is trained on the first of them."""
    names, other, columns = _named(arguments, inputs)

    def texts() -> Iterator[str]:
        return stream(names, columns, inputs)

    first = (Document("", lambda text=text: text) for text in texts())
    tokenizer = tokenizers.load(name, take(first, FIRST_BYTES))
    if tokenizer.eos_token_id is None:
        raise Unsupported("the tokenizer has no end-of-text token, which stands between documents")
    held = _blocks(arguments, tokenizer, load(other, columns, inputs)) if other else None
    if held is None and arguments.eval_strategy != "no":
        raise Unsupported("a stream holds nothing out: evaluations need --eval_dataset or an input named validation")
    collectives.check_same("held-out data", held.fingerprint() if held is not None else "")
    described = f"a stream of {', '.join(names)}, {len(held or ()):,} blocks held out"
    return Task(tokenizer, Texts(texts, tokenizer, arguments.block_size), held, default_collate, [], described)


def _causal_lm(arguments: Arguments, tokenizer: Any, train: list[Document], held_out: list[Document]) -> Task:
    if tokenizer.eos_token_id is None:
        raise Unsupported("the tokenizer has no end-of-text token, which stands between documents")
    size = arguments.block_size
    tokens = packed(take(train, arguments.max_train_bytes), tokenizer)
    blocks = Blocks(tokens, size, arguments.max_train_samples)
    held = _blocks(arguments, tokenizer, held_out) if held_out else None
    described = f"{len(blocks.tokens):,} tokens in {len(blocks):,} blocks, {len(held or ()):,} blocks held out"
    return Task(tokenizer, blocks, held, default_collate, [], described)


def _blocks(arguments: Arguments, tokenizer: Any, held_out: list[Document]) -> Blocks:
    """Return held-out blocks."""
    # Four bytes a token is what English and code come to; the cut at the right block follows in Blocks.
    few = arguments.max_eval_samples * arguments.block_size * 16 if arguments.max_eval_samples >= 0 else -1
    return Blocks(packed(take(held_out, few), tokenizer), arguments.block_size, arguments.max_eval_samples)


def _chat(arguments: Arguments, tokenizer: Any, train: list[Document], held_out: list[Document]) -> Task:
    size, answers = arguments.block_size, arguments.assistant_only_loss
    turns, idle = chat.samples(train, tokenizer, size, answers, arguments.max_train_samples)
    held = chat.samples(held_out, tokenizer, size, answers, arguments.max_eval_samples)[0] if held_out else None
    learned = sum(label != IGNORED for labels in turns.labels for label in labels)
    described = (
        f"{len(turns):,} conversations, {learned:,} of {sum(map(len, turns.ids)):,} tokens are learned, "
        f"{len(held or ()):,} held out" + (f"; {idle:,} have nothing to learn in {size} tokens" if idle else "")
    )
    return Task(tokenizer, turns, held, partial(padded, pad=tokenizer.pad_token_id), [], described)


def _classification(arguments: Arguments, tokenizer: Any, train: list[Document], held_out: list[Document]) -> Task:
    labels = sorted(
        {str(document.label) for document in train},
        key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
    )
    if len(labels) < 2:
        raise Unsupported(f"classification needs two labels at least, the data has {', '.join(labels) or 'none'}")
    index = {name: number for number, name in enumerate(labels)}
    if strange := sorted({str(document.label) for document in held_out} - index.keys()):
        raise Unsupported(f"the label {strange[0]!r} is held out only: the model cannot learn it")

    def rows(documents: list[Document], limit: int) -> Rows:
        documents = documents if limit < 0 else documents[:limit]
        texts = [document.read() for document in documents]
        ids = tokenizer(texts, truncation=True, max_length=arguments.block_size)["input_ids"] if texts else []
        # An empty text still needs a token to be looked at.
        ids = [row or [tokenizer.pad_token_id] for row in ids]
        return Rows(ids, [index[str(document.label)] for document in documents])

    learned = rows(train, arguments.max_train_samples)
    held = rows(held_out, arguments.max_eval_samples) if held_out else None
    described = f"{len(learned):,} texts of {len(labels)} classes, {len(held or ()):,} texts held out"
    return Task(tokenizer, learned, held, partial(padded, pad=tokenizer.pad_token_id), labels, described)
