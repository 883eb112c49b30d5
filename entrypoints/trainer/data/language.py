"""The built-in tasks of language models: causal LM, chat and classification of texts.

causal-lm                 all text in one stream, cut into blocks; at hand, or read as it comes (stream.py)
chat                      conversations through a chat template, answers are learned (chat.py)
sequence-classification   one text with one label a sample, padded to the longest of a batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from .. import collectives
from ..errors import Unsupported
from ..kinds import CausalText, Conversations, LabelledTexts
from ..labels import IGNORED
from . import chat
from . import tokenizer as tokenizers
from .documents import NO_DATASET, bounded, hold_out, load, stream, take
from .row_files import Columns, Document
from .row_table import NEVER
from .samples import Blocks, padded
from .shared_reading import SharedReader
from .stream import Texts
from .tasks import Task
from .token_rows import Encoder, Row, Rows, TokenRows, token_rows

if TYPE_CHECKING:
    from ..arguments import Arguments

DEFAULT_TOKENIZER = "bpe:4096"
FIRST_BYTES = 1 << 26  # of a stream, for a tokenizer that is trained on it


class TextTask(Task):
    """A task of documents and a tokenizer."""

    @classmethod
    def prepare(cls, arguments: Arguments, inputs: Mapping[str, str]) -> Task:
        """Return the task with its samples; collective."""
        train, held_out = _documents(arguments, inputs, cls.columns(arguments))
        name = arguments.tokenizer or arguments.model or DEFAULT_TOKENIZER
        return cls.from_documents(arguments, cls.tokenizer_of(name, arguments, train), train, held_out)

    @classmethod
    def tokenizer_of(cls, name: str, arguments: Arguments, train: Sequence[Document]) -> Any:
        """Return the tokenizer of that name, trained on these documents where the name says so; collective."""
        return tokenizers.load(name, take(train, arguments.max_train_bytes))

    @classmethod
    def from_documents(
        cls, arguments: Arguments, tokenizer: Any, train: Sequence[Document], held_out: Sequence[Document]
    ) -> Task:
        """Return the task of these documents."""
        raise NotImplementedError


class CausalLM(CausalText, TextTask):
    """The next token of a text."""

    @classmethod
    def prepare(cls, arguments: Arguments, inputs: Mapping[str, str]) -> Task:
        """Return the task with its samples, or of a stream; collective."""
        if arguments.streaming:
            name = arguments.tokenizer or arguments.model or DEFAULT_TOKENIZER
            return cls(*_stream(arguments, name, inputs, cls.columns(arguments)))
        return super().prepare(arguments, inputs)

    @classmethod
    def from_documents(
        cls, arguments: Arguments, tokenizer: Any, train: Sequence[Document], held_out: Sequence[Document]
    ) -> Task:
        """Return the task of these documents."""
        if tokenizer.eos_token_id is None:
            raise Unsupported("the tokenizer has no end-of-text token to put between documents")
        size = arguments.block_size
        rows = packed(train, tokenizer, arguments.token_cache, arguments.max_train_bytes)
        blocks = Blocks(rows.tokens, size, arguments.max_train_samples)
        held = _blocks(arguments, tokenizer, held_out) if held_out else None
        described = f"{len(blocks.tokens):,} tokens in {len(blocks):,} blocks, {len(held or ()):,} blocks held out"
        return cls(tokenizer, blocks, held, default_collate, [], described + rows.kept)

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the mean loss of a token and the perplexity."""
        return with_perplexity(super().summary(sums))


class Chat(Conversations, TextTask):
    """The answers of conversations."""

    @classmethod
    def tokenizer_of(cls, name: str, arguments: Arguments, train: Sequence[Document]) -> Any:
        """Return the tokenizer with its chat template."""
        tokenizer = tokenizers.load(name, chat.words(train))
        chat.furnish(tokenizer, arguments)
        return tokenizer

    @classmethod
    def from_documents(
        cls, arguments: Arguments, tokenizer: Any, train: Sequence[Document], held_out: Sequence[Document]
    ) -> Task:
        """Return the task of these documents."""
        size, answers = arguments.block_size, arguments.assistant_only_loss
        few, folder = arguments.max_eval_samples, arguments.token_cache
        turns, idle = chat.samples(train, tokenizer, size, answers, arguments.max_train_samples, folder)
        held = chat.samples(held_out, tokenizer, size, answers, few, folder)[0] if held_out else None
        described = (
            f"{len(turns):,} conversations, {turns.rows.learned():,} of {len(turns.rows.tokens):,} tokens are learned, "
            f"{len(held or ()):,} held out"
            + (f"; {idle:,} have no tokens to learn within {size} tokens" if idle else "")
            + turns.rows.kept
        )
        return cls(tokenizer, turns, held, partial(padded, pad=tokenizer.pad_token_id), [], described)

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the mean loss of a token and the perplexity."""
        return with_perplexity(super().summary(sums))


class Classification(LabelledTexts, TextTask):
    """The class of a text."""

    @classmethod
    def from_documents(
        cls, arguments: Arguments, tokenizer: Any, train: Sequence[Document], held_out: Sequence[Document]
    ) -> Task:
        """Return the task of these documents."""
        labels = sorted(
            {str(document.label) for document in train},
            key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
        )
        if len(labels) < 2:
            raise Unsupported(
                f"classification needs at least two labels, but the data has {', '.join(labels) or 'none'}"
            )
        index = {name: number for number, name in enumerate(labels)}
        if strange := sorted({str(document.label) for document in held_out} - index.keys()):
            raise Unsupported(f"the label {strange[0]!r} is in the evaluation data only: the model cannot learn it")

        def rows(documents: Sequence[Document], limit: int) -> Rows:
            documents = documents if limit < 0 else documents[:limit]
            return labelled(documents, tokenizer, arguments.block_size, index, arguments.token_cache)

        learned = rows(train, arguments.max_train_samples)
        held = rows(held_out, arguments.max_eval_samples) if held_out else None
        described = f"{len(learned):,} texts of {len(labels)} classes to train on, {len(held or ()):,} held out"
        described += learned.rows.kept
        return cls(tokenizer, learned, held, partial(padded, pad=tokenizer.pad_token_id), labels, described)

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
        """Return the likeliest class and the label of each sample."""
        counts = batch["labels"] != IGNORED
        return {"predictions": outputs.argmax(-1)[counts], "labels": batch["labels"][counts]}

    def metrics(self, predictions: Mapping[str, Any]) -> dict[str, float]:
        """Return the F1 score, the mean of all classes."""
        return {"f1": macro_f1(predictions["predictions"], predictions["labels"])}


def packed(documents: Sequence[Document], tokenizer: Any, folder: str = NEVER, max_bytes: int = -1) -> TokenRows:
    """Return the tokens of all texts, an end-of-text token behind each; of at most so many bytes of text.

    `folder` is where they are kept (token_cache.py).
    """

    def rows(some: Sequence[Document]) -> list[Row]:
        texts = [text for document in some if (text := document.read())]
        if not texts:
            return []
        found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [([*ids, tokenizer.eos_token_id], None, -1) for ids in found]

    chosen = documents if max_bytes < 0 else list(bounded(documents, max_bytes))
    return token_rows(chosen, Encoder(rows, tokenizer, ("texts",)), folder)


def labelled(
    documents: Sequence[Document], tokenizer: Any, block_size: int, index: Mapping[str, int], folder: str
) -> Rows:
    """Return the texts with the numbers of their labels, each cut at `block_size` tokens."""

    def rows(some: Sequence[Document]) -> list[Row]:
        texts = [document.read() for document in some]
        ids = tokenizer(texts, truncation=True, max_length=block_size)["input_ids"]
        # An empty text still needs a token to be looked at.
        filled = [row or [tokenizer.pad_token_id] for row in ids]
        return [(row, None, index[str(document.label)]) for row, document in zip(filled, some, strict=True)]

    settings = ("sequence-classification", block_size, sorted(index.items()))
    return Rows(token_rows(documents, Encoder(rows, tokenizer, settings), folder))


def with_perplexity(results: dict[str, float]) -> dict[str, float]:
    """Return the results of an evaluation with the perplexity, e to the mean loss of a token."""
    loss = results["eval_loss"]
    return results | {"eval_perplexity": math.exp(loss) if loss < 700 else math.inf}


def macro_f1(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean F1 score of the classes that occur in labels (N,) or predictions (N,), as scikit-learn has it."""
    scores = []
    for each in torch.cat([predictions, labels]).unique():
        right = ((predictions == each) & (labels == each)).sum()
        scores.append(2 * right / ((predictions == each).sum() + (labels == each).sum()))
    return float(torch.stack(scores).mean()) if scores else 0.0


def _named(arguments: Arguments, inputs: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the names of what is trained on and of what is held out."""
    names = arguments.dataset or (["input:train"] if "train" in inputs else [])
    if not names:
        raise Unsupported(NO_DATASET)
    return names, arguments.eval_dataset or (["input:validation"] if "validation" in inputs else [])


def _documents(
    arguments: Arguments, inputs: Mapping[str, str], columns: Columns
) -> tuple[Sequence[Document], Sequence[Document]]:
    names, other = _named(arguments, inputs)
    documents = load(names, columns, inputs, arguments.token_cache)
    if other:
        return documents, load(other, columns, inputs, arguments.token_cache)
    return hold_out(documents, arguments.validation_split_percentage, whole=columns.turns or bool(columns.together))


def _stream(arguments: Arguments, name: str, inputs: Mapping[str, str], columns: Columns) -> tuple[Any, ...]:
    """Return the fields of a task of texts that are read as they come; its tokenizer is trained on the first of them."""
    names, other = _named(arguments, inputs)

    group = collectives.cpu_group() if collectives.world_size() > 1 else None

    def texts(epoch: int) -> Iterator[Document]:
        reader = SharedReader(True, group)
        return stream(names, columns, inputs, arguments.shuffle_buffer_size, arguments.seed + epoch, reader)

    tokenizer = tokenizers.load(name, take(stream(names, columns, inputs), FIRST_BYTES))
    if tokenizer.eos_token_id is None:
        raise Unsupported("the tokenizer has no end-of-text token to put between documents")
    held = _blocks(arguments, tokenizer, load(other, columns, inputs, arguments.token_cache)) if other else None
    if held is None and arguments.eval_strategy != "no":
        raise Unsupported(
            "with --streaming no documents are held out: evaluations need --eval_dataset or an input named validation"
        )
    described = f"a stream of {', '.join(names)}, {len(held or ()):,} blocks held out"
    return tokenizer, Texts(texts, tokenizer, arguments.block_size), held, default_collate, [], described


def _blocks(arguments: Arguments, tokenizer: Any, held_out: Sequence[Document]) -> Blocks:
    """Return held-out blocks."""
    # Four bytes a token is what English and code come to; the cut at the right block follows in Blocks.
    few = arguments.max_eval_samples * arguments.block_size * 16 if arguments.max_eval_samples >= 0 else -1
    tokens = packed(held_out, tokenizer, arguments.token_cache, few).tokens
    return Blocks(tokens, arguments.block_size, arguments.max_eval_samples)
