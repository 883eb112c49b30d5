"""Losses on held-out samples, exact whatever the world is."""

from __future__ import annotations

from typing import Any

import model as models
import torch


def evaluate(accelerator: Any, model: Any, batches: Any) -> dict[str, float]:
    """Return the mean loss over held-out samples, each counted once; collective, waits for the device."""
    model.eval()
    rows = []
    with torch.no_grad():
        for batch in batches:
            logits, labels = model(**models.inputs(batch)).logits, batch["labels"]
            right = models.hits(logits, labels)
            each = torch.stack([models.losses(logits, labels), models.counted(labels), right], dim=1)  # (B, 3)
            # To make batches equal Accelerate gives some ranks samples twice; this leaves the second ones out.
            rows.append(accelerator.gather_for_metrics(each.double()))
    model.train()
    loss, count, right = torch.cat(rows).sum(0).tolist()
    found = {"eval_loss": loss / max(count, 1)}
    if labels.dim() == 1:
        found["eval_accuracy"] = right / max(count, 1)
    return found


def said(found: dict[str, float]) -> str:
    """Return an evaluation for people."""
    accuracy = f"  accuracy {found['eval_accuracy']:.3f}" if "eval_accuracy" in found else ""
    return f"loss {found['eval_loss']:.3f}{accuracy}"
