"""Chat data: conversations as tokens through a chat template, with labels on the assistant's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from ..columns import NO_MESSAGES, wrong_conversation
from ..errors import Unsupported
from ..labels import IGNORED
from .row_table import NEVER
from .samples import EMPTY, Item
from .token_rows import Encoder, Row, TokenRows, token_rows

if TYPE_CHECKING:
    from ..arguments import Arguments
    from .row_files import Document

BEGIN, END = "<|im_start|>", "<|im_end|>"
# ChatML, for tokenizers that were trained here; {% generation %} marks what an assistant says.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, str]


class Turns(Dataset[Item]):
    """Conversations of their own lengths; labels are the tokens that are learned, the others are ignored."""

    def __init__(self, rows: TokenRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        return self.rows.item(max(index, 0), index != EMPTY)

    def fingerprint(self) -> str:
        """Return a hash of all samples."""
        return self.rows.fingerprint()


def conversation(document: Document) -> list[Message]:
    """Return the messages of a document; raises Unsupported for what is no conversation."""
    try:
        messages = json.loads(document.read())
    except ValueError:
        raise Unsupported(f"{document.where}: {NO_MESSAGES}") from None
    if wrong := wrong_conversation(messages):
        raise Unsupported(f"{document.where}: {wrong}")
    return messages  # type: ignore[no-any-return]


def words(documents: Iterable[Document]) -> Iterator[str]:
    """Yield the text of all messages, for a tokenizer to be trained on."""
    for document in documents:
        yield from (message["content"] for message in conversation(document))


def furnish(tokenizer: Any, arguments: Arguments) -> None:
    """Give the tokenizer its chat template: the one asked for, its own, or ChatML where it was trained here."""
    if arguments.chat_template_path:
        try:
            tokenizer.chat_template = Path(arguments.chat_template_path).read_text("utf-8")
        except OSError as error:
            raise Unsupported(f"--chat_template_path {arguments.chat_template_path}: {error.strerror}") from None
    elif tokenizer.chat_template is None:
        if arguments.model:
            raise Unsupported("the tokenizer has no chat template: name a file with one, --chat_template_path")
        tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [BEGIN]})
        tokenizer.chat_template = TEMPLATE


def encoded(tokenizer: Any, messages: list[Message], answers_only: bool) -> tuple[list[int], list[int]]:
    """Return (tokens, labels) of a conversation; raises Unsupported when the template hides where answers are."""
    ids, mask = _masked(tokenizer, messages) if answers_only else (_tokens(tokenizer, messages), None)
    return ids, ids if mask is None else [
        token if learned else IGNORED for token, learned in zip(ids, mask, strict=True)
    ]


def samples(
    documents: Sequence[Document],
    tokenizer: Any,
    block_size: int,
    answers_only: bool,
    limit: int,
    folder: str = NEVER,
) -> tuple[Turns, int]:
    """Return the conversations, each cut at `block_size` tokens, and how many were left out: nothing to learn in them.

    `folder` is where their tokens are kept (token_cache.py).
    """
    documents = documents if limit < 0 else documents[:limit]

    def rows(some: Sequence[Document]) -> list[Row]:
        both = (encoded(tokenizer, conversation(document), answers_only) for document in some)
        cut = ((ids[:block_size], labels[:block_size]) for ids, labels in both)
        return [(ids, labels, -1) for ids, labels in cut if any(label != IGNORED for label in labels[1:])]

    found = token_rows(documents, Encoder(rows, tokenizer, ("chat", block_size, answers_only)), folder)
    return Turns(found), len(documents) - len(found)


def _masked(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[int]]:
    if _MARKED.search(tokenizer.chat_template):
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])
    # A template that marks nothing: an answer is what its turn adds to the text before it.
    ids = _tokens(tokenizer, messages)
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _tokens(tokenizer, messages[:number], add_generation_prompt=True)
            after = _tokens(tokenizer, messages[: number + 1])
            if after[: len(before)] != before or ids[: len(after)] != after:
                raise Unsupported(
                    "the chat template renders earlier turns differently when others follow: mark the answers in it with"
                    " {% generation %} (--chat_template_path)"
                )
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    return ids, mask


def _tokens(tokenizer: Any, messages: list[Message], **options: Any) -> list[int]:
    if not messages:
        return []
    return list(tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])
