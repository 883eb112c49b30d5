"""Tokenized rows of their own lengths, with labels and classes: flat arrays, memory-mapped from the token cache.

A token that is not learned is stored as -1 minus the token: one array holds tokens and labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..labels import IGNORED
from .row_files import Document
from .row_table import NEVER
from .samples import EMPTY, MOST_TEXT
from .token_cache import PIECE, Arrays, Work, kept_arrays
from .tokenizer import fingerprint

GROUP = 256  # documents that are tokenized at a time
_BLOCK = 1 << 20  # tokens that are counted at a time

Row = tuple[Sequence[int], Sequence[int] | None, int]  # tokens; labels (None: the tokens); class, -1 for none
Ints = np.ndarray[Any, np.dtype[np.int32]]


class TokenRows(Sequence[Ints]):
    """Rows of tokens: `rows[i]` are the tokens of one of them.

    Args:
        tokens: of all rows, (N,).
        shapes: length and class of each row, flat, (2 x rows,).
        place: where they are kept, "" if in memory.
    """

    def __init__(self, tokens: Ints, shapes: Ints, place: str = "") -> None:
        self.tokens, self.shapes, self.place = tokens, shapes.reshape(-1, 2), place
        self.ends = np.cumsum(self.shapes[:, 0], dtype=np.int64)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> TokenRows:
        """Return rows in memory."""
        return cls(*joined([_flat(rows)]))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        stored = self._stored(index)
        return np.where(stored < 0, ~stored, stored)

    def _stored(self, index: int) -> Ints:
        end = int(self.ends[index])
        return np.asarray(self.tokens[end - int(self.shapes[index, 0]) : end])

    def item(self, index: int, learned: bool = True) -> dict[str, torch.Tensor]:
        """Return the tokens of a row and their labels: (T,) each; all labels are ignored unless `learned`."""
        stored = torch.from_numpy(self._stored(index).astype(np.int64))
        ids = torch.where(stored < 0, ~stored, stored)
        return {"input_ids": ids, "labels": ids.masked_fill(stored < 0 if learned else stored == stored, IGNORED)}

    @property
    def kept(self) -> str:
        """The end of a line that describes the data: where the tokens are kept, "" if in memory."""
        return f"; tokens are cached in {self.place}" if self.place else ""

    def learned(self) -> int:
        """Return how many tokens of all rows are learned."""
        begins = range(0, len(self.tokens), _BLOCK)
        return sum(int(np.count_nonzero(self.tokens[begin : begin + _BLOCK] >= 0)) for begin in begins)

    def fingerprint(self) -> str:
        """Return a hash of all rows."""
        whole = hashlib.sha256(np.ascontiguousarray(self.shapes))
        whole.update(np.ascontiguousarray(self.tokens))
        return whole.hexdigest()


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Texts of their own lengths, each with one class."""

    def __init__(self, rows: TokenRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        label = IGNORED if index == EMPTY else int(self.rows.shapes[index, 1])
        return {"input_ids": self.rows.item(max(index, 0))["input_ids"], "labels": torch.tensor(label)}

    def fingerprint(self) -> str:
        """Return a hash of all samples."""
        return self.rows.fingerprint()


@dataclass(frozen=True)
class Encoder:
    """Makes the rows of some documents.

    Args:
        rows: the rows of these documents, in their order; none of a document that teaches nothing.
        tokenizer: what they are made with.
        settings: all else that decides what they are.
    """

    rows: Callable[[Sequence[Document]], list[Row]]
    tokenizer: Any
    settings: tuple[Any, ...]

    def encode(self, documents: Sequence[Document]) -> Iterator[Arrays]:
        """Yield the flat arrays of a few documents at a time."""
        group, size = list[Document](), 0
        for document in documents:
            text = document.read()
            group.append(replace(document, read=text.__str__))
            size += len(text)
            if len(group) == GROUP or size > MOST_TEXT:
                yield _flat(self.rows(group))
                group, size = [], 0
        if group:
            yield _flat(self.rows(group))

    def digest(self, content: str) -> str:
        """Return what tells the rows of documents with this hash from all others."""
        import tokenizers
        import transformers

        words = self.tokenizer
        used = ("chat_template", "special_tokens_map", "truncation_side", "eos_token_id", "pad_token_id")
        made_by = [
            "1 rows", tokenizers.__version__, transformers.__version__, fingerprint(words),
            *(getattr(words, name, None) for name in used), *self.settings, content,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(made_by, default=str).encode()).hexdigest()[:32]


def token_rows(documents: Sequence[Document], encoder: Encoder, folder: str = NEVER) -> TokenRows:
    """Return the rows of documents, tokenized once by the processes of a machine together.

    Args:
        documents: in the order of the rows.
        encoder: makes the rows.
        folder: where they are kept; "" is the user's cache, for large texts alone, and `none` keeps nothing.
    """
    if folder == NEVER or getattr(encoder.tokenizer, "backend_tokenizer", None) is None:
        return TokenRows(*joined(encoder.encode(documents)))
    whole, size, cuts = hashlib.sha256(), 0, [(0, 0)]  # of each piece: its first document, the bytes before it
    for number, document in enumerate(documents):
        raw = document.read().encode("utf-8", "surrogatepass")
        whole.update(len(raw).to_bytes(8, "big") + raw + json.dumps(document.label).encode())
        if size - cuts[-1][1] >= PIECE:
            cuts.append((number, size))
        size += len(raw)
    cuts.append((len(documents), size))

    def groups() -> Iterator[tuple[Sequence[Document], int]]:
        for (first, before), (last, behind) in pairwise(cuts):
            yield documents[first:last], behind - before

    work = Work(("tokens", "shapes"), groups, encoder.encode)
    arrays, place = kept_arrays(work, encoder.digest(whole.hexdigest()), size, folder)
    return TokenRows(*(arrays or joined(encoder.encode(documents))), place)


def joined(parts: Any) -> Arrays:
    """Return parts of flat arrays as whole ones."""
    columns = list(zip(*parts, strict=True)) or [(), ()]
    return tuple(np.concatenate(column) if column else np.zeros(0, np.int32) for column in columns)


def _flat(rows: Sequence[Row]) -> Arrays:
    tokens, shapes = [np.zeros(0, np.int32)], list[int]()
    for ids, labels, number in rows:
        stored = np.asarray(ids, np.int32)
        if labels is not None:
            stored = np.where(np.asarray(labels) == IGNORED, ~stored, stored)
        tokens.append(stored)
        shapes += (len(stored), number)
    return np.concatenate(tokens), np.asarray(shapes, np.int32)
