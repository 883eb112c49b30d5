"""Task, the trainer's interface to what is learned, and the built-in tasks by name.

A built-in task is a class of this interface. A class of the job's source (`--task mypkg.task:MyTask`) is wrapped in one
by custom.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import collectives
from .. import model as models
from ..errors import Unsupported
from .samples import Item
from .stream import StreamBatches

if TYPE_CHECKING:
    from ..arguments import Arguments

CLASSES = {
    "causal-lm": "trainer.data.language:CausalLM",
    "chat": "trainer.data.language:Chat",
    "sequence-classification": "trainer.data.language:Classification",
    "dpo": "trainer.data.preference:PreferenceTuning",
}

Samples = Any  # Blocks, Rows, Turns; a stream's Texts, which have no length


@dataclass
class Task:
    """Samples, what they are learned by, and what belongs to them; equal on every rank.

    The loss of this class is that of labels. What a rank has of the model, or of a sequence, is enough for it.
    """

    tokenizer: Any
    train: Samples
    held_out: Samples | None
    collate: Callable[[list[Item]], Item]
    labels: list[str] = field(default_factory=list)
    described: str = ""
    predicted: list[dict[str, Any]] = field(default_factory=list)  # by `scores`, a batch each, of this rank's samples
    table: list[dict[str, Any]] = field(default_factory=list)  # rows of `samples`, of the newest evaluation
    own_loss: ClassVar[bool] = False  # it needs the whole model, and whole samples
    unit: ClassVar[str] = "tokens"  # of `size`
    gathers: ClassVar[bool] = False  # `scores` appends to `predicted`, of which `metrics` are made

    @classmethod
    def prepare(cls, arguments: Arguments, inputs: Mapping[str, str]) -> Task:
        """Return the task with its samples; collective. Raises Unsupported for data that cannot be trained on."""
        raise NotImplementedError

    def model(self, arguments: Arguments) -> torch.nn.Module:
        """Return the model, the same on every rank; it may be without values yet (weights.py)."""
        return models.outline(arguments, self.tokenizer, self.labels)

    def optimizer(self, model: torch.nn.Module, arguments: Arguments) -> torch.optim.Optimizer:
        """Return the optimizer of what is trained."""
        return models.optimizer(model, arguments)

    def prepared(self, strategy: Any) -> None:
        """Use the model as the strategy has wrapped it, before the first step and before a checkpoint is read. Collective."""

    def stream(self, **batching: Any) -> StreamBatches:
        """Return this rank's batches of a stream, `train`."""
        return StreamBatches(self.train, **batching)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Return the batch where the model is; the host does not wait for the copy."""
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    def count(self, model: Any, batch: Any) -> torch.Tensor:
        """Return over how many labels the loss of a batch is the mean: ()."""
        return models.counted(batch["labels"]).sum()

    def size(self, batch: Any) -> torch.Tensor | int:
        """Return how many tokens a batch has, for the speed."""
        return models.length(batch)

    def losses(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the losses of a batch, which are summed and divided by the `count` of the global batch."""
        return models.losses(model(**models.inputs(batch)).logits, batch["labels"])

    def scores(self, model: Any, batch: Any) -> torch.Tensor:
        """Return numbers of an evaluation, in float64: a row for each sample, or one of all together."""
        return models.scored(model(**models.inputs(batch)).logits, batch["labels"])

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the results of an evaluation by name, made of the sums of all rows."""
        loss, count, right = sums
        results = {"eval_loss": loss / max(count, 1)}
        return results | {"eval_accuracy": right / max(count, 1)} if self.labels else results

    def metrics(self, predictions: Mapping[str, Any]) -> dict[str, float]:
        """Return more results by name, of the predictions of all held-out samples."""
        return {}

    def samples(self, predictions: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows for the table `predictions`."""
        return []


def task_class(name: str) -> type[Task]:
    """Return the class of a built-in task, or the one that wraps a class of the source."""
    module, _, own = CLASSES.get(name, "trainer.data.custom:CustomTask").partition(":")
    return getattr(importlib.import_module(module), own)  # type: ignore[no-any-return]


def prepare(arguments: Arguments, inputs: Mapping[str, str]) -> Task:
    """Return the task with its samples; collective. Raises Unsupported when ranks would not see the same."""
    task = task_class(arguments.task).prepare(arguments, inputs)
    if arguments.streaming:
        return task
    if len(task.train) == 0:
        raise Unsupported("there is nothing to train on: the training data has no rows. Check dataset and its files")
    if task.held_out is not None and len(task.held_out) == 0:
        task.held_out = None
    for name, samples in (("training data", task.train), ("held-out data", task.held_out)):
        collectives.check_same(name, "" if samples is None else samples.fingerprint())
    return task
