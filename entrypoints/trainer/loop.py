"""The training loop: one optimiser step after the other, with logging, evaluations, checkpoints and requests to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import cloudtrain_runtime as runtime
import torch

from . import collectives
from . import model as models
from .checkpoints.manager import CheckpointManager
from .metrics import Meter, MetricsLogger
from .strategies.ddp import Strategy


@dataclass
class Loop:
    """What train.py trains with; `step` counts what is done, those of earlier attempts included."""

    strategy: Strategy
    batches: Any  # the place in the data: GlobalBatches or StreamBatches
    feed: Iterable[Any]  # this rank's micro-batches, from that place on
    _: KW_ONLY
    schedule: Any  # of the learning rate
    meter: Meter
    logger: MetricsLogger
    manager: CheckpointManager
    main: bool  # rank 0, whose clock says when a checkpoint is due
    total_steps: int
    save: Callable[[], None]  # collective
    report: Callable[[dict[str, float]], None]  # loss and speed since the last report, and the learning rate
    logging_steps: int
    log_first: bool = True
    every_steps: int | None = None  # between checkpoints
    every_s: float | None = None
    max_grad_norm: float = 0.0  # 0: gradients are not clipped
    evaluate: Callable[[], bool] = lambda: False  # after a step that is not the last; True ends the training
    step: int = 0
    saved_step: int = 0

    def run(self, over: bool = False) -> bool:
        """Train until the last step, or until asked to leave; return whether that was before the last one. Collective."""
        strategy, batches = self.strategy, self.batches
        agreement = collectives.Agreement()
        stop, checked = False, False
        last = over or self.step >= self.total_steps
        strategy.model.train()
        self.logger.begin(self.step)
        self.meter.since = self.meter.clock.monotonic()
        while not (last or stop):
            source = iter(self.feed)
            for count in batches.windows():
                window = [strategy.to_device(next(source)) for _ in range(count)]
                # The loss is the mean over all labels of the global batch: unequal lengths weigh as they should.
                labels = torch.stack([strategy.label_count(batch) for batch in window]).sum()
                labels = strategy.total(labels).clamp(min=1)
                for batch, share in zip(window, strategy.learn(window, labels), strict=True):
                    self.meter.add(share, strategy.task.size(batch), models.pairs(batch) if self.meter.use else 0)
                if not checked and (norms := strategy.check_gradients()):
                    self.logger.event(
                        "world", step=self.step + 1, gradient_norms_per_rank=norms[:256], **strategy.seen()
                    )
                checked = True
                norm = strategy.clip(self.max_grad_norm) if self.max_grad_norm > 0 else None
                rate = self.schedule.get_last_lr()[0]
                if strategy.step():
                    self.schedule.step()
                self.step += 1
                self.meter.steps += 1
                batches.advance()

                last = self.step == self.total_steps
                self.manager.report_results()
                due = self.main and self.manager.due(self.every_s)
                stop, due = agreement.settle(runtime.stop_requested(), due)
                due = due and self.step - self.saved_step > 1  # rank 0 may have asked before the last one
                if self.step % self.logging_steps == 0 or last or (self.step == 1 and self.log_first):
                    values = {**self.meter.read(strategy), "learning_rate": rate}
                    if norm is not None:
                        values["grad_norm"] = float(norm)
                    self.report(values)
                if not last and self.evaluate():
                    last = True
                if due or last or stop or (self.every_steps is not None and self.step % self.every_steps == 0):
                    self.save()
                if last or stop:
                    break
            if batches.exhausted:
                batches.next_epoch()
        agreement.close()
        self.manager.wait()
        return stop and not last
