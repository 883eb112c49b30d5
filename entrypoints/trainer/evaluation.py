"""Evaluate the model on held-out samples; each counts once, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch


def evaluate(strategy: Any, batches: Any) -> dict[str, float]:
    """Return the results over held-out samples, each counted once; collective, waits for the device."""
    strategy.model.eval()
    rows = []
    with torch.no_grad():
        for batch in batches:
            batch = strategy.to_device(batch)
            rows.append(strategy.scores(batch))
    strategy.model.train()
    results: dict[str, float] = strategy.task.summary(torch.cat(rows).sum(0).tolist())
    return results


def describe(scores: dict[str, float]) -> str:
    """Return an evaluation for people."""
    accuracy = f"  accuracy {scores['eval_accuracy']:.3f}" if "eval_accuracy" in scores else ""
    return f"loss {scores['eval_loss']:.3f}{accuracy}"
