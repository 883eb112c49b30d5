"""A task of the user's own: a class of the source that gives model, data, loss and more.

The class has `model()`, `train_data()` and `loss(model, batch)`; it may have `eval_data()`, `collate(samples)`,
`count(batch)`, `predictions(outputs, batch)`, `metrics(predictions)`, `samples(predictions)`, `parameter_groups(model)`,
`weights()` and `tokenizer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import default_collate

from .. import collectives, meta_device
from .. import model as models
from ..errors import Unsupported
from .in_memory import moved
from .sample_stream import Samples
from .tasks import Task, load_class, options, weighed

if TYPE_CHECKING:
    from ..arguments import Arguments

NEEDED = ("model", "train_data", "loss")


@dataclass
class CustomTask(Task):
    """Wraps an object of the user's class. A batch is the number of samples that count, and the user's own batch."""

    own: Any = None
    unit: ClassVar[str] = "samples"
    wraps: ClassVar[bool] = True

    @classmethod
    def prepare(cls, arguments: Arguments, inputs: Mapping[str, str]) -> Task:
        """Return the task of the class that the arguments name."""
        own = load_class(arguments.task)(arguments, inputs, **options(arguments.task_args))
        if missing := [name for name in NEEDED if not callable(getattr(own, name, None))]:
            raise Unsupported(f"the task {arguments.task} has no method {missing[0]}()")
        train, held_out = own.train_data(), own.eval_data() if hasattr(own, "eval_data") else None
        for name, data in (("train_data", train), ("eval_data", held_out)):
            if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
                raise Unsupported(f"{name}() of {arguments.task} must return a dataset with __len__ and __getitem__")
        if hasattr(own, "metrics") and not hasattr(own, "predictions"):
            raise Unsupported(f"the task {arguments.task} has metrics(), but no predictions() that it is computed of")
        held = None if held_out is None else OwnSamples(held_out)
        described = f"{len(train):,} samples to train on, {len(held or ()):,} held out"
        return cls(getattr(own, "tokenizer", None), OwnSamples(train), held, default_collate, [], described, own=own)

    def __post_init__(self) -> None:
        self.own_collate = getattr(self.own, "collate", default_collate)
        self.collate = self._collate
        self.gathers = hasattr(self.own, "metrics")  # type: ignore[misc]

    def _collate(self, items: list[Any]) -> Any:
        return sum(counts for counts, _ in items), self.own_collate([item for _, item in items])

    def model(self, arguments: Arguments) -> torch.nn.Module:
        """Return the user's model, without values where it is built on the meta device. Collective.

        Raises Unsupported where ranks built different ones, and for a model without values that cannot get any.
        """
        model: torch.nn.Module = self.own.model()
        digest = hashlib.sha256()
        stored = str(self.own.weights()) if hasattr(self.own, "weights") else ""
        if meta_device.is_empty(model):
            model = meta_device.outlined(model, self.own.model, arguments.seed, stored)
            names = [f"{name} {tuple(parameter.shape)}" for name, parameter in model.named_parameters()]
            collectives.check_same("model", "\n".join([stored, *names]))
            return model
        if stored:
            raise Unsupported(
                f"weights() of {arguments.task} is for a model without values: build it below torch.device('meta')"
            )
        for name, parameter in model.named_parameters():
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.detach().double().sum().item()!r}".encode())
        collectives.check_same("model", digest.hexdigest())
        return model

    def optimizer(self, model: torch.nn.Module, arguments: Arguments) -> torch.optim.Optimizer:
        """Return AdamW of the user's parameter groups, or of all that is trained.

        Raises Unsupported where a parameter that is trained is in no group.
        """
        if not hasattr(self.own, "parameter_groups"):
            return models.optimizer(model, arguments)
        groups = [{**group, "params": list(group["params"])} for group in self.own.parameter_groups(model)]
        grouped = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in grouped:
                raise Unsupported(
                    f"parameter_groups() of {arguments.task} leaves out {name}: add it to a group, or set its "
                    "requires_grad to False in model()"
                )
        return models.optimizer(model, arguments, groups)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Return the batch where the model is."""
        count, own = batch
        return torch.tensor(count, device=device), moved(own, device)

    def count(self, model: Any, batch: Any) -> torch.Tensor:
        """Return over how many samples, or what the user counts, the loss of a batch is the mean."""
        samples, own = batch
        if not hasattr(self.own, "count"):
            return samples  # type: ignore[no-any-return]
        return torch.as_tensor(self.own.count(own), device=samples.device) * (samples > 0)

    def size(self, batch: Any) -> torch.Tensor | int:
        """Return how many samples a batch has."""
        return batch[0]  # type: ignore[no-any-return]

    def losses(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, weighed so that the mean is that of the global batch."""
        return weighed(self._loss(model, batch)[0], self.count(model, batch))

    def scores(self, model: Any, batch: Any) -> torch.Tensor:
        """Return (loss, what it is the mean of), and keep the predictions."""
        loss, outputs = self._loss(model, batch)
        count = self.count(model, batch)
        if self.gathers and int(batch[0]) > 0:
            self.predicted.append(moved(self.own.predictions(outputs, batch[1]), "cpu"))
        return torch.stack([weighed(loss, count), count]).double()[None]

    def _loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        made = self.own.loss(model, batch[1])
        loss, outputs = made if isinstance(made, tuple) else (made, None)
        if loss.numel() != 1:
            raise Unsupported(
                f"loss() of the task {type(self.own).__name__} must return the mean loss, one number, "
                f"not a tensor of shape {tuple(loss.shape)}"
            )
        return loss.reshape(()), outputs

    def metrics(self, predictions: Mapping[str, Any]) -> dict[str, float]:
        """Return the user's metrics of all held-out samples."""
        return self.own.metrics(predictions)  # type: ignore[no-any-return]

    def samples(self, predictions: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the user's rows for the table `predictions`."""
        return list(self.own.samples(predictions)) if hasattr(self.own, "samples") else []

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the mean loss."""
        return {"eval_loss": sums[0] / max(sums[1], 1)}


class OwnSamples(Samples):
    """The user's data: only its length can be compared between ranks."""

    def fingerprint(self) -> str:
        """Return the number of samples."""
        return str(len(self))
