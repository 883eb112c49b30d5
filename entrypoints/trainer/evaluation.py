"""Evaluate the model on held-out samples; each counts once, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch


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
    return {
        name: torch.cat(each) if isinstance(each[0], torch.Tensor) else [one for part in each for one in part]
        for name, each in values.items()
    }


def describe(scores: dict[str, float]) -> str:
    """Return an evaluation for people."""
    more = (f"  {name.removeprefix('eval_')} {value:.3f}" for name, value in scores.items() if name != "eval_loss")
    return f"loss {scores['eval_loss']:.3f}{''.join(more)}"
