"""Score a trained model on the texts of a file: loss and perplexity, or loss, accuracy and F1 of a classifier.

The loss is that of the shared trainer's evaluations: texts of a language model are cut into blocks, of conversations the
answers count, and of a classifier each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from .arguments import Arguments
from .data import documents, row_files
from .data.language import CausalLM, Chat, Classification, labelled
from .data.row_table import NEVER
from .data.samples import padded
from .data.tasks import Task
from .errors import Unsupported
from .evaluation import joined
from .saved import Saved


@dataclass(frozen=True)
class Reading:
    """How a file is read."""

    text_column: str = "text"
    messages_column: str = "messages"
    label_column: str = "label"
    block_size: int = 512
    batch_size: int = 8
    limit: int = -1  # samples, -1: all


def prepare(path: Path, saved: Saved, reading: Reading) -> Task:
    """Return the samples of a file as a task of the model, in `train`; raises Unsupported for what does not fit it."""
    length = getattr(saved.model.config, "max_position_embeddings", None) or reading.block_size
    size = min(reading.block_size, length)
    chat = not saved.classifies and saved.tokenizer.chat_template is not None and _has_turns(path, reading)
    columns = row_files.Columns(
        reading.messages_column if chat else reading.text_column,
        reading.label_column if saved.classifies else None,
        turns=chat,
    )
    found = documents.load([str(path)], columns, {})
    arguments = Arguments(block_size=size, max_train_samples=reading.limit, token_cache=NEVER)
    if saved.classifies:
        task: Task = _classification(found, saved, size, reading.limit)
    else:
        task = (Chat if chat else CausalLM).from_documents(arguments, saved.tokenizer, found, [])
    if len(task.train) == 0:
        raise Unsupported(f"{path} has no sample to evaluate on")
    return task


def score(task: Task, saved: Saved, batch_size: int) -> dict[str, float]:
    """Return the results of a model over the samples of a task; blocking."""
    device = next(saved.model.parameters()).device
    task.predicted.clear()
    saved.model.eval()
    rows = []
    with torch.no_grad():
        for batch in DataLoader(task.train, batch_size=batch_size, collate_fn=task.collate):
            rows.append(task.scores(saved.model, task.to_device(batch, device)).cpu())
    results = task.summary(torch.cat(rows).sum(0).tolist())
    results = {name.removeprefix("eval_"): value for name, value in results.items()}
    if task.gathers:
        results |= {name: float(value) for name, value in task.metrics(joined(task.predicted)).items()}
    return results


def _has_turns(path: Path, reading: Reading) -> bool:
    """Return whether the first row of a file is a conversation."""
    if path.suffix.lower() not in row_files.ENDINGS:
        return False
    row = next((row for _, row in row_files.numbered_rows(path)), {})
    return reading.messages_column in row or row.keys() >= row_files.PAIR


def _classification(found: Sequence[row_files.Document], saved: Saved, size: int, limit: int) -> Task:
    """Return the samples with the classes of the model, not those that the file happens to have."""
    config, found = saved.model.config, found if limit < 0 else found[:limit]
    index = {str(name): number for name, number in (config.label2id or {}).items()}
    given = {str(document.label) for document in found}
    if given - index.keys():
        numbers = {str(number): number for number in range(config.num_labels)}
        unnamed = all(name == f"LABEL_{number}" for name, number in index.items())
        if not unnamed or given - numbers.keys():
            strange, names = sorted(given - index.keys())[0], sorted(index, key=lambda name: index[name])
            raise Unsupported(
                f"the label {strange!r} of the data is not one of the model's labels: {', '.join(names[:10])}"
            )
        index = numbers
    rows = labelled(found, saved.tokenizer, size, index, NEVER)
    pad = saved.tokenizer.pad_token_id
    return Classification(saved.tokenizer, rows, None, partial(padded, pad=pad), list(index))
