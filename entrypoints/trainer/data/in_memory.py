"""Tasks of models and data in memory: any module by any loss, and language models by their labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import default_collate

from .. import model as models
from ..labels import IGNORED
from .sample_stream import OwnBatches, Samples
from .samples import EMPTY
from .tasks import LossOfLabels, Task, weighed


@dataclass
class InMemoryTask(OwnBatches):
    """Any module by any loss."""

    parts: dict[str, Any] = field(default_factory=dict)

    def model(self, arguments: Any) -> torch.nn.Module:
        """Return the model that came with the job."""
        return self.parts["model"]  # type: ignore[no-any-return]

    def optimizer(self, model: torch.nn.Module, arguments: Any) -> torch.optim.Optimizer:
        """Return the user's optimizer of all that is trained, or AdamW."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if made := self.parts.get("optimizer"):
            return made(trained)  # type: ignore[no-any-return]
        return models.optimizer(model, arguments, [{"params": trained}])

    def prepared(self, strategy: Any) -> None:
        """Let the user's hook synchronise the gradients."""
        if (hook := self.parts.get("communication_hook")) and hasattr(strategy.model, "register_comm_hook"):
            strategy.model.register_comm_hook(None, hook)

    def count(self, model: Any, batch: Any) -> torch.Tensor:
        """Return over how many labels, or samples, the loss of a batch is the mean."""
        count, own = batch
        labels = labels_of(model, own, self.parts.get("loss"))
        return count if labels is None else labels * (count > 0)

    def loss_of(self, model: Any, batch: Any) -> tuple[Any, ...]:
        """Return the mean loss of a batch, the model's outputs and the target."""
        return loss_of(model, batch, self.parts.get("loss"))

    def scores(self, model: Any, batch: Any) -> torch.Tensor:
        """Return (loss, labels or samples that count, right ones, those that could be)."""
        loss, outputs, target = self.loss_of(model, batch[1])
        count = self.count(model, batch)
        right = torch.zeros(2, device=loss.device)
        if target is not None and not target.is_floating_point() and outputs.dim() == target.dim() + 1 == 2:
            right = torch.stack([(outputs.argmax(-1) == target).sum(), count]) * (count > 0)
        return torch.stack([weighed(loss, count), count, *right]).double()[None]

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the mean loss, and the accuracy of classes."""
        loss, count, right, classes = sums
        results = {"eval_loss": loss / max(count, 1)}
        return results | {"eval_accuracy": right / classes} if classes else results


class Labelled(Samples):
    """The data of a language model: of a sample that does not count all labels are ignored."""

    def __getitem__(self, index: int) -> Any:
        sample = {name: torch.as_tensor(value) for name, value in self.sample(max(index, 0)).items()}
        return sample | {"labels": torch.full_like(sample["labels"], IGNORED)} if index == EMPTY else sample


@dataclass
class InMemoryLanguageTask(LossOfLabels, InMemoryTask):
    """A language model of transformers by its labels: every strategy can spread that."""

    def _collate(self, items: list[Any]) -> Any:
        return self.own_collate(items)


def make_task(parts: dict[str, Any], own_loss: bool) -> Task:
    """Return the task of what came with a job."""
    kind, wrap = (InMemoryTask, Samples) if own_loss else (InMemoryLanguageTask, Labelled)
    data, held_out = parts["data"], parts.get("eval_data")
    collate = parts.get("collate") or default_collate
    task = kind(None, wrap(data), None if held_out is None else wrap(held_out), collate, parts=parts)
    task.described = f"{len(data):,} samples" if hasattr(data, "__len__") else "a stream of samples"
    task.described += f", {len(held_out):,} held out" if held_out is not None else ""
    return task


def loss_of(model: Any, batch: Any, loss: Any) -> tuple[Any, Any, Any]:
    """Return the mean loss of a batch, the model's outputs and the target.

    A dictionary is the model's keyword arguments, its `labels` the target; of a sequence the last is the target.
    """
    if isinstance(batch, dict):
        labels = batch.get("labels")
        if loss is None and _knows_its_loss(model):
            made = model(**batch)
            if getattr(made, "loss", None) is None:
                name = type(getattr(model, "module", model)).__name__
                raise ValueError(f"{name} returns no loss for {', '.join(batch)}: pass loss=, or labels in each sample")
            return made.loss, getattr(made, "logits", made.loss), labels
        outputs, target = model(**{name: value for name, value in batch.items() if name != "labels"}), labels
    else:
        *inputs, target = batch
        outputs = model(*inputs)
    return (loss or plain_loss)(outputs, target), getattr(outputs, "logits", outputs), target


def labels_of(model: Any, batch: Any, loss: Any) -> Any:
    """Return of how many labels `loss_of` is the mean, None where those are the batch's samples."""
    if isinstance(batch, dict) and loss is None and _knows_its_loss(model):
        return counted(model, batch.get("labels"))
    return None


def _knows_its_loss(model: Any) -> bool:
    return hasattr(getattr(model, "module", model), "config")


def counted(model: Any, labels: Any) -> Any:
    """Return how many labels a transformers model takes its mean over."""
    if labels is None or labels.is_floating_point():
        return None
    causal = type(getattr(model, "module", model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return ((labels[..., 1:] if causal else labels) != IGNORED).sum()


def plain_loss(outputs: Any, target: Any) -> Any:
    """Return cross entropy for classes and the mean squared error for numbers."""
    outputs = getattr(outputs, "logits", outputs)
    if not target.is_floating_point():
        return functional.cross_entropy(outputs, target)
    if outputs.shape != target.shape:  # would be broadcast, and learned wrongly without an error
        if outputs.shape != (*target.shape, 1):
            raise ValueError(f"the model gives {tuple(outputs.shape)} for targets of {tuple(target.shape)}: pass loss=")
        outputs = outputs.squeeze(-1)
    return functional.mse_loss(outputs, target)
