"""The best evaluation of a run, its checkpoint, and early stopping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .errors import Unsupported

if TYPE_CHECKING:
    from .arguments import Arguments


class BestEvaluation:
    """Compares every evaluation with the best so far; equal on all ranks."""

    def __init__(self, arguments: Arguments) -> None:
        self.name = f"eval_{arguments.metric_for_best_model}"
        lowest = (
            self.name.endswith(("loss", "perplexity"))
            if arguments.greater_is_better == "auto"
            else (arguments.greater_is_better == "false")
        )
        self.sign = -1.0 if lowest else 1.0
        self.patience, self.threshold = arguments.early_stopping_patience, arguments.early_stopping_threshold
        self.keeps = arguments.load_best_model_at_end
        self.value: float | None = None
        self.checkpoint = ""  # its folder's name
        self.in_vain = 0  # evaluations since the last better one

    def update(self, scores: dict[str, float]) -> bool:
        """Take an evaluation and return whether it is the best so far."""
        if self.name not in scores:
            known = ", ".join(name.removeprefix("eval_") for name in scores)
            raise Unsupported(f"--metric_for_best_model is one of {known}, not {self.name.removeprefix('eval_')}")
        value = scores[self.name]
        is_first = self.value is None or math.isnan(self.value)  # NaN is of an older version's checkpoint
        gain = value if math.isnan(value) else math.inf if is_first else (value - self.value) * self.sign
        self.in_vain = 0 if gain > self.threshold else self.in_vain + 1
        if not gain > 0:  # what is not a number is never best
            return False
        self.value = value
        return True

    @property
    def enough(self) -> bool:
        """Whether it is no longer worth continuing."""
        return 0 < self.patience <= self.in_vain

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue."""
        return {"value": self.value, "checkpoint": self.checkpoint, "in_vain": self.in_vain}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume from there."""
        self.value, self.checkpoint, self.in_vain = state["value"], state["checkpoint"], state["in_vain"]
