"""Log training metrics: a line for people, an event for cloudtrain, a row for trackers; loss and speed (Meter)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudtrain_runtime as runtime
import torch

from .clock import SYSTEM, Clock

if TYPE_CHECKING:
    from .mfu import Use


class Meter:
    """Sums up loss and tokens between two lines, on the device: nothing waits for it before a line is due."""

    def __init__(
        self, device: torch.device, use: Use | None = None, unit: str = "tokens", clock: Clock = SYSTEM
    ) -> None:
        # this rank's share of the loss, its tokens, the pairs of tokens in its samples
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.use = use  # for MFU
        self.unit = unit
        self.steps = 0
        self.clock = clock
        self.since = clock.monotonic()

    def add(self, share: torch.Tensor, tokens: torch.Tensor | int, pairs: torch.Tensor | int = 0) -> None:
        """Count one micro-batch: its share of the step's mean loss, its tokens, and pairs of them where MFU is reported."""
        self.sums[0] += share.detach()
        self.sums[1] += tokens
        if self.use is not None:
            self.sums[2] += pairs

    def read(self, strategy: Any) -> dict[str, float]:
        """Return the mean loss and the speed since the last reading, over all ranks; collective, waits for the device."""
        loss, tokens, pairs = strategy.total(self.sums).tolist()
        now = self.clock.monotonic()
        seconds = max(now - self.since, 1e-9)
        values = {"loss": loss / max(self.steps, 1), f"{self.unit}_per_s": tokens / seconds}
        if self.use is not None:
            values["mfu"] = self.use.share(tokens, pairs, seconds)
        self.sums.zero_()
        self.steps, self.since = 0, now
        return values

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to name the same numbers."""
        return {"sums": self.sums.cpu(), "steps": self.steps}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume from there."""
        self.sums[0] = state["sums"][0]  # tokens of an attempt before took time that this one does not know
        self.steps = state["steps"]


class MetricsLogger:
    """Prints and emits on rank 0 only."""

    def __init__(self, main: bool, total_steps: int = 0, clock: Clock = SYSTEM) -> None:
        self.main, self.total_steps, self._clock = main, total_steps, clock
        self.accelerator: Any = None  # set where trackers are wanted
        self._began: tuple[float, int] | None = None

    def say(self, text: str) -> None:
        """Print text for people."""
        if self.main:
            print(text, flush=True)

    def event(self, kind: str, **data: Any) -> None:
        """Emit an event of the run."""
        if self.main:
            runtime.emit(kind, **data)

    def metrics(self, step: int, **values: float) -> None:
        """Emit numbers of one step, to trackers too."""
        self.event("metric", step=step, **values)
        if self.accelerator is not None:
            self.accelerator.log(values, step=step)

    def table(self, step: int, name: str, rows: list[dict[str, Any]]) -> None:
        """Keep rows as a table of one step, in W&B too."""
        if not self.main or not rows:
            return
        runtime.log_table(name, rows, step=step)
        for tracker in self.accelerator.trackers if self.accelerator is not None else ():
            if tracker.name == "wandb":
                columns = list(rows[0])
                tracker.log_table(name, columns, [[row[column] for column in columns] for row in rows], step=step)

    def begin(self, step: int) -> None:
        """The first step comes next: time is counted from here."""
        self._began = (self._clock.monotonic(), step)

    def line(self, step: int, values: dict[str, float]) -> None:
        """Print step, loss, speed and remaining time."""
        assert self._began is not None
        seconds, first = self._clock.monotonic() - self._began[0], self._began[1]
        left = seconds / max(step - first, 1) * (self.total_steps - step)
        used = f"  MFU {values['mfu']:.1%}" if "mfu" in values else ""
        speed, unit = next((value, name.removesuffix("_per_s")) for name, value in values.items() if "_per_s" in name)
        self.say(
            f"step {step}/{self.total_steps}  loss {values['loss']:.3f}  lr {values['learning_rate']:.1e}  "
            f"{speed:,.0f} {unit}/s{used}  ETA {clock(left)}"
        )


def clock(seconds: float) -> str:
    """Return 0:07, 12:34 or 1:02:03."""
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
