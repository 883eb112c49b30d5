"""Evaluate the model on held-out samples; each counts once, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from .errors import Unsupported


def evaluate(strategy: Any, batches: Any) -> dict[str, float]:
    """Return the results over held-out samples, each counted once; collective, waits for the device."""
    task = strategy.task
    strategy.model.eval()
    task.predicted.clear()
    rows = []
    with torch.no_grad():
        for batch in batches:
            batch = strategy.to_device(batch)
            rows.append(strategy.scores(batch))
    strategy.model.train()
    results: dict[str, float] = task.summary(torch.cat(rows).sum(0).tolist())
    if task.gathers:
        predictions = joined(strategy.gather(task.predicted))
        more, task.table = task.metrics(predictions), task.samples(predictions)
        results |= {f"eval_{name}": float(value) for name, value in more.items()}
    return results


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the predictions of all batches by name: tensors in one, of anything else a list."""
    values: dict[str, list[Any]] = {}
    for batch in batches:
        for name, value in batch.items():
            values.setdefault(name, []).append(value)
    return {name: _in_one(name, each) for name, each in values.items()}


def _in_one(name: str, parts: list[Any]) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        return [row for part in parts for row in part]
    shapes = {tuple(part.shape[1:]) if part.dim() else "none" for part in parts}
    if len(shapes) > 1 or "none" in shapes:
        raise Unsupported(
            f"predictions() gives {name!r} rows of the shapes {', '.join(sorted(map(str, shapes)))}: return one row "
            "for each sample, and a list of them where their shapes differ"
        )
    return torch.cat(parts)


def describe(scores: dict[str, float]) -> str:
    """Return an evaluation for people."""
    more = (f"  {name.removeprefix('eval_')} {value:.3f}" for name, value in scores.items() if name != "eval_loss")
    return f"loss {scores['eval_loss']:.3f}{''.join(more)}"
