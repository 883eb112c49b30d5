"""Labels of samples: which of them a loss counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORED = -100  # a label that no loss counts


def targets(labels: torch.Tensor) -> torch.Tensor:
    """Return the labels that a loss is taken of: (B, T - 1) of the next tokens, or (B,) classes."""
    return labels[:, 1:] if labels.dim() == 2 else labels


def counted(labels: torch.Tensor) -> torch.Tensor:
    """Return how many labels of each sample count: (B,)."""
    return (targets(labels) != IGNORED).view(len(labels), -1).sum(1)
