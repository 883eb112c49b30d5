"""What each task makes of documents: a tokenizer, samples to learn from, samples held out, classes.

causal-lm                 all text in one stream, cut into blocks
sequence-classification   one text with one label a sample, padded to the longest of a batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import data
import parallel
import tokenizer as tokenizers
from refused import Refused
from samples import Blocks, Item, Rows, packed, padded
from torch.utils.data import default_collate

if TYPE_CHECKING:
    from arguments import Arguments

DEFAULT_TOKENIZER = "bpe:4096"


@dataclass
class Task:
    """Samples and what belongs to them; equal on every rank."""

    tokenizer: Any
    train: Blocks | Rows
    held_out: Blocks | Rows | None
    collate: Callable[[list[Item]], Item]
    labels: list[str] = field(default_factory=list)
    described: str = ""


def prepare(arguments: Arguments, inputs: Mapping[str, str]) -> Task:
    """Return the task with its samples; collective. Raises Refused when ranks would not see the same."""
    train, held_out = _documents(arguments, inputs)
    name = arguments.tokenizer or arguments.model or DEFAULT_TOKENIZER
    tokenizer = tokenizers.load(name, data.take(train, arguments.max_train_bytes))
    make = _causal_lm if arguments.task == "causal-lm" else _classification
    task = make(arguments, tokenizer, train, held_out)
    if len(task.train) == 0:
        raise Refused("there is nothing to train on: the texts are empty")
    if task.held_out is not None and len(task.held_out) == 0:
        task.held_out = None
    parallel.check_same("training data", task.train.fingerprint())
    parallel.check_same("held-out data", task.held_out.fingerprint() if task.held_out is not None else "")
    return task


def _documents(arguments: Arguments, inputs: Mapping[str, str]) -> tuple[list[data.Document], list[data.Document]]:
    label = arguments.label_column if arguments.task == "sequence-classification" else None
    columns = data.Columns(arguments.text_column, label, arguments.dataset_config, arguments.dataset_split)
    names = arguments.dataset or (["input:train"] if "train" in inputs else [])
    if not names:
        raise Refused("there is no --dataset and the job has no input named train")
    other = arguments.eval_dataset or (["input:validation"] if "validation" in inputs else [])
    documents = data.load(names, columns, inputs)
    if other:
        return documents, data.load(other, columns, inputs)
    return data.hold_out(documents, arguments.validation_split_percentage)


def _causal_lm(arguments: Arguments, tokenizer: Any, train: list[data.Document], held_out: list[data.Document]) -> Task:
    if tokenizer.eos_token_id is None:
        raise Refused("the tokenizer has no end-of-text token, which stands between documents")
    size = arguments.block_size
    stream = packed(data.take(train, arguments.max_train_bytes), tokenizer)
    blocks = Blocks(stream, size, arguments.max_train_samples)
    held = None
    if held_out:
        # Four bytes a token is what English and code come to; the cut at the right block follows in Blocks.
        few = arguments.max_eval_samples * size * 16 if arguments.max_eval_samples >= 0 else -1
        held = Blocks(packed(data.take(held_out, few), tokenizer), size, arguments.max_eval_samples)
    described = f"{len(blocks.tokens):,} tokens in {len(blocks):,} blocks, {len(held or ()):,} blocks held out"
    return Task(tokenizer, blocks, held, default_collate, [], described)


def _classification(
    arguments: Arguments, tokenizer: Any, train: list[data.Document], held_out: list[data.Document]
) -> Task:
    labels = sorted(
        {str(document.label) for document in train},
        key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
    )
    if len(labels) < 2:
        raise Refused(f"classification needs two labels at least, the data has {', '.join(labels) or 'none'}")
    index = {name: number for number, name in enumerate(labels)}
    if strange := sorted({str(document.label) for document in held_out} - index.keys()):
        raise Refused(f"the label {strange[0]!r} is held out only: the model cannot learn it")

    def rows(documents: list[data.Document], limit: int) -> Rows:
        documents = documents if limit < 0 else documents[:limit]
        texts = [document.read() for document in documents]
        ids = tokenizer(texts, truncation=True, max_length=arguments.block_size)["input_ids"] if texts else []
        # An empty text still needs a token to be looked at.
        ids = [one or [tokenizer.pad_token_id] for one in ids]
        return Rows(ids, [index[str(document.label)] for document in documents])

    learned = rows(train, arguments.max_train_samples)
    held = rows(held_out, arguments.max_eval_samples) if held_out else None
    described = f"{len(learned):,} texts of {len(labels)} classes, {len(held or ()):,} texts held out"
    return Task(tokenizer, learned, held, partial(padded, pad=tokenizer.pad_token_id), labels, described)
