"""Preference tuning (DPO): pairs of answers, of which the model learns to prefer one.

Rows have `prompt`, `chosen` and `rejected`: texts, or lists of messages that go through the chat template. The reference
model is the model as it is before the first step. It never changes, so only its log-probabilities are kept: they are
computed once at each start, by the same ranks in the same layout, and no second model stays in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils.data import Dataset

from .. import collectives
from .. import model as models
from ..columns import NO_PAIR, are_messages
from ..errors import Unsupported
from ..kinds import Preferences
from ..labels import IGNORED
from . import chat
from . import tokenizer as tokenizers
from .language import TextTask
from .row_files import Document
from .samples import EMPTY, Item, padded
from .tasks import Task
from .token_rows import Encoder, Row, TokenRows, token_rows

if TYPE_CHECKING:
    from ..arguments import Arguments

Tokens = tuple[list[int], list[int]]  # tokens of prompt and answer, labels of the answer alone


class Pairs(Dataset[dict[str, Any]]):
    """Pairs of answers, with their log-probabilities under the reference model once those are known."""

    def __init__(self, rows: TokenRows) -> None:
        self.rows = rows  # two for each pair
        self.reference = torch.zeros(len(self), 2)

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = max(index, 0)
        both = [self.rows.item(2 * at), self.rows.item(2 * at + 1)]
        return {"rows": both, "reference": self.reference[at], "counts": torch.tensor(float(index != EMPTY))}

    def fingerprint(self) -> str:
        """Return a hash of all pairs."""
        return self.rows.fingerprint()


@dataclass
class PreferenceTuning(Preferences, TextTask):
    """Direct preference optimisation (Rafailov et al., 2023)."""

    beta: float = 0.1
    batch_size: int = 8  # of the pass that asks the reference model

    @classmethod
    def tokenizer_of(cls, name: str, arguments: Arguments, train: Sequence[Document]) -> Any:
        """Return the tokenizer, with a chat template where the rows are conversations."""
        tokenizer = tokenizers.load(name, (text for document in train for text in _words(document)))
        if any(isinstance(value, list) for value in _row(train[0]).values()):
            chat.furnish(tokenizer, arguments)
        return tokenizer

    @classmethod
    def from_documents(
        cls, arguments: Arguments, tokenizer: Any, train: Sequence[Document], held_out: Sequence[Document]
    ) -> Task:
        """Return the task of these documents."""
        size, folder = arguments.block_size, arguments.token_cache
        pairs, cut = _pairs(train, tokenizer, size, arguments.max_train_samples, folder)
        held = _pairs(held_out, tokenizer, size, arguments.max_eval_samples, folder)[0] if held_out else None
        described = f"{len(pairs):,} pairs of answers to train on, {len(held or ()):,} held out"
        described += f"; {cut:,} have no answer within {size} tokens" if cut else ""
        described += pairs.rows.kept
        return cls(
            tokenizer, pairs, held, partial(collated, pad=tokenizer.pad_token_id), [], described,
            beta=arguments.dpo_beta, batch_size=arguments.per_device_eval_batch_size,
        )  # fmt: skip

    def prepared(self, strategy: Any) -> None:
        """Compute the log-probabilities of the reference model, each pair on one rank. Collective."""
        for samples in (self.train, self.held_out):
            if samples is not None:
                samples.reference = self._reference(strategy, samples)

    def _reference(self, strategy: Any, samples: Pairs) -> torch.Tensor:
        """Return the log-probabilities of (chosen, rejected) of all pairs: (N, 2), equal on every rank."""
        rank, ranks, size = strategy.rank, strategy.plan.world, self.batch_size
        found: dict[int, torch.Tensor] = {}
        strategy.model.eval()
        with torch.no_grad():
            for begin in range(0, len(samples), size * ranks):  # alike on all ranks: a forward pass may be collective
                first = begin + rank * size
                indices = list(range(first, min(first + size, len(samples))))
                batch = strategy.to_device(self.collate([samples[index] for index in indices or [EMPTY]]))
                rows = torch.stack(self._log_probabilities(strategy.model, batch), dim=1).cpu()
                found |= dict(zip(indices, rows, strict=False))
        strategy.model.train()
        strategy.reshard()
        everything = {index: row for part in collectives.every_rank(found) for index, row in part.items()}
        return torch.stack([everything[index] for index in range(len(samples))])

    def _log_probabilities(self, model: Any, batch: Item) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the chosen answers and of the rejected ones: (B,) each."""
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        chosen, rejected = (-models.losses(logits, batch["labels"])).chunk(2)
        return chosen, rejected

    def _rewards(self, model: Any, batch: Item) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return loss and implicit rewards of each pair: (B,) each."""
        reference = batch["reference"].unbind(1)
        chosen, rejected = (
            self.beta * (mine - theirs)
            for mine, theirs in zip(self._log_probabilities(model, batch), reference, strict=True)
        )
        return -functional.logsigmoid(chosen - rejected), chosen.detach(), rejected.detach()

    def count(self, model: Any, batch: Item) -> torch.Tensor:
        """Return how many pairs count: the loss is the mean over them."""
        return batch["counts"].sum()

    def losses(self, model: Any, batch: Item) -> torch.Tensor:
        """Return the loss of each pair: (B,)."""
        return self._rewards(model, batch)[0] * batch["counts"]

    def scores(self, model: Any, batch: Item) -> torch.Tensor:
        """Return (loss, pairs that count, reward of the chosen answer, of the rejected, right order): (B, 5)."""
        loss, chosen, rejected = self._rewards(model, batch)
        self.keep(model, torch.stack([chosen, rejected], dim=1), batch)
        rows = torch.stack([loss, torch.ones_like(loss), chosen, rejected, (chosen > rejected).float()], dim=1)
        return (rows * batch["counts"][:, None]).double()

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the mean loss and the implicit rewards, by TRL's names."""
        loss, _, chosen, rejected, right = (each / max(sums[1], 1) for each in sums)
        return {
            "eval_loss": loss,
            "eval_rewards/chosen": chosen,
            "eval_rewards/rejected": rejected,
            "eval_rewards/margins": chosen - rejected,
            "eval_rewards/accuracies": right,
        }


def collated(items: Sequence[dict[str, Any]], pad: int) -> Item:
    """Return a batch: the chosen answers, then the rejected ones (2B, T); reference (B, 2) and counts (B,)."""
    batch = padded([item["rows"][which] for which in (0, 1) for item in items], pad)
    return batch | {name: torch.stack([item[name] for item in items]) for name in ("reference", "counts")}


def _row(document: Document) -> dict[str, Any]:
    return json.loads(document.read())  # type: ignore[no-any-return]


def _words(document: Document) -> Iterator[str]:
    for value in _row(document).values():
        yield from [value] if isinstance(value, str) else (str(message.get("content", "")) for message in value)


def _pairs(documents: Sequence[Document], tokenizer: Any, size: int, limit: int, folder: str) -> tuple[Pairs, int]:
    """Return the pairs, each answer cut at `size` tokens, and how many were left out: the prompt takes all of them."""
    documents = documents if limit < 0 else documents[:limit]

    def rows(some: Sequence[Document]) -> list[Row]:
        made = list[Row]()
        for document in some:
            row = _row(document)
            both = [
                _encoded(document.where, row["prompt"], row[name], tokenizer, size) for name in ("chosen", "rejected")
            ]
            if all(any(label != IGNORED for label in labels[1:]) for _, labels in both):
                made += [(ids, labels, -1) for ids, labels in both]
        return made

    pairs = Pairs(token_rows(documents, Encoder(rows, tokenizer, ("dpo", size)), folder))
    return pairs, len(documents) - len(pairs)


def _encoded(where: str, prompt: Any, answer: Any, tokenizer: Any, size: int) -> Tokens:
    if isinstance(prompt, str) and isinstance(answer, str):
        begin, end = (
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (prompt, answer)
        )
        ids = [*begin, *end] + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    elif are_messages(prompt) and are_messages(answer):
        begin = list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        ids = list(tokenizer.apply_chat_template([*prompt, *answer], return_dict=True)["input_ids"])
        if ids[: len(begin)] != begin:
            raise Unsupported(
                "the chat template renders a prompt differently when its answer follows: use another template"
            )
    else:
        raise Unsupported(f"{where}: {NO_PAIR}")
    labels = [IGNORED] * len(begin) + ids[len(begin) :]
    return ids[:size], labels[:size]
