"""Losses on held-out samples, exact whatever the world is."""

from __future__ import annotations

from typing import Any

import torch


def evaluate(strategy: Any, batches: Any) -> dict[str, float]:
    """Return the mean loss over held-out samples, each counted once; collective, waits for the device."""
    strategy.model.eval()
    rows = []
    with torch.no_grad():
        for batch in batches:
            batch = {name: tensor.to(strategy.device, non_blocking=True) for name, tensor in batch.items()}
            rows.append(strategy.scores(batch))
    strategy.model.train()
    loss, count, right = torch.cat(rows).sum(0).tolist()
    found = {"eval_loss": loss / max(count, 1)}
    if batch["labels"].dim() == 1:
        found["eval_accuracy"] = right / max(count, 1)
    return found


def said(found: dict[str, float]) -> str:
    """Return an evaluation for people."""
    accuracy = f"  accuracy {found['eval_accuracy']:.3f}" if "eval_accuracy" in found else ""
    return f"loss {found['eval_loss']:.3f}{accuracy}"
