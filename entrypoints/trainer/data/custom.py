"""A task of the user's own that does not derive from Task: a class of the source with a few methods.

The class has `model()` and `train_data()`; it may have `loss(model, batch)`, `eval_data()`, `collate(samples)`,
`count(batch)`, `predictions(outputs, batch)`, `metrics(predictions)`, `samples(predictions)`, `generate(model, prompt)`,
`parameter_groups(model)`, `weights()`, `tokenizer` and `own_arguments`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import IterableDataset, default_collate

from .. import collectives, meta_device
from ..errors import Unsupported
from ..labels import IGNORED
from .sample_stream import OwnBatches, Samples
from .tasks import LossOfLabels, Task, load_class, moved, options, weighed

if TYPE_CHECKING:
    from ..arguments import Arguments

NEEDED = ("model", "train_data")
OF_PREDICTIONS = ("metrics", "samples")  # what is computed of predictions()


@dataclass
class CustomTask(OwnBatches):
    """Wraps an object of the user's class."""

    own: Any = None
    wraps: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    @classmethod
    def prepare(cls, arguments: Arguments, inputs: Mapping[str, str]) -> Task:
        """Return the task of the class that the arguments name."""
        own = load_class(arguments.task)(arguments, inputs, **options(arguments.task_args))
        check_methods(own, arguments.task)
        train, held_out = own.train_data(), own.eval_data() if hasattr(own, "eval_data") else None
        check_data(train, held_out, arguments)
        held = None if held_out is None else OwnSamples(held_out)
        described = "a stream of samples" if arguments.streaming else f"{len(train):,} samples to train on"
        described += f", {len(held or ()):,} held out"
        kind = cls if hasattr(own, "loss") else CustomLanguageTask
        collate = getattr(own, "collate", default_collate)
        return kind(getattr(own, "tokenizer", None), OwnSamples(train), held, collate, [], described, own=own)

    @property
    def gathers(self) -> bool:
        """Whether the predictions of held-out samples are kept, for `metrics` and `samples`."""
        return any(hasattr(self.own, name) for name in OF_PREDICTIONS)

    @property
    def generates(self) -> bool:
        """Whether the trained model writes texts, rows of the table `samples`."""
        return hasattr(self.own, "generate")

    def generate(self, model: Any, prompt: str, tokens: int, seed: int) -> str:
        """Return the text that the user's class makes of a prompt."""
        return str(self.own.generate(model, prompt))

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

    def parameter_groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """Return the user's groups, none where the class has no such method."""
        return list(self.own.parameter_groups(model)) if hasattr(self.own, "parameter_groups") else []

    def count(self, model: Any, batch: Any) -> torch.Tensor:
        """Return over how many samples, or what the user counts, the loss of a batch is the mean."""
        samples, own = batch
        if not hasattr(self.own, "count"):
            return samples  # type: ignore[no-any-return]
        return torch.as_tensor(self.own.count(own), device=samples.device) * (samples > 0)

    def scores(self, model: Any, batch: Any) -> torch.Tensor:
        """Return (loss, what it is the mean of), and keep the predictions."""
        loss, outputs = self.loss_of(model, batch[1])
        count = self.count(model, batch)
        if self.gathers and int(batch[0]) > 0:
            self.predicted.append(moved(self.own.predictions(outputs, batch[1]), "cpu"))
        return torch.stack([weighed(loss, count), count]).double()[None]

    def loss_of(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the user's loss of a batch and the outputs, None where it gives none."""
        made = self.own.loss(model, batch)
        loss, outputs = made if isinstance(made, tuple) else (made, None)
        if loss.numel() != 1:
            raise Unsupported(
                f"loss() of the task {type(self.own).__name__} must return the mean loss, one number, "
                f"not a tensor of shape {tuple(loss.shape)}"
            )
        return loss.reshape(()), outputs

    def metrics(self, predictions: Mapping[str, Any]) -> dict[str, float]:
        """Return the user's metrics of all held-out samples."""
        return self.own.metrics(predictions) if hasattr(self.own, "metrics") else {}

    def samples(self, predictions: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the user's rows for the table `predictions`."""
        return list(self.own.samples(predictions)) if hasattr(self.own, "samples") else []

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the mean loss."""
        return {"eval_loss": sums[0] / max(sums[1], 1)}


@dataclass
class CustomLanguageTask(LossOfLabels, CustomTask):
    """Wraps a class without `loss`: that of a language model by the labels of its batches, in chunks where it can be."""

    def _collate(self, items: list[Any]) -> Any:
        batch = self.own_collate([item for _, item in items])
        if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
            raise Unsupported(
                f"the task {type(self.own).__name__} has no loss(): its batches must have input_ids and labels, or write one"
            )
        counts = torch.tensor([counts for counts, _ in items])[:, None]
        return dict(batch) | {"labels": batch["labels"].masked_fill(~counts, IGNORED)}

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
        """Return the user's predictions of a batch."""
        return self.own.predictions(outputs, batch)  # type: ignore[no-any-return]


class OwnSamples(Samples):
    """The user's data: only its length can be compared between ranks."""

    def fingerprint(self) -> str:
        """Return the number of samples."""
        return str(len(self))


def check_methods(own: Any, task: str) -> None:
    """Raise Unsupported for a class that lacks a method, or has one that could never be called."""
    if missing := [name for name in NEEDED if not callable(getattr(own, name, None))]:
        raise Unsupported(f"the task {task} has no method {missing[0]}()")
    for name in OF_PREDICTIONS:
        if hasattr(own, name) and not hasattr(own, "predictions"):
            raise Unsupported(f"the task {task} has {name}(), but no predictions() that it is computed of")
    if hasattr(own, "count") and not hasattr(own, "loss"):
        raise Unsupported(f"the task {task} has count(), but no loss(): without it the labels are counted")


def check_data(train: Any, held_out: Any, arguments: Arguments) -> None:
    """Raise Unsupported for data that has no length, and for a stream that has one."""
    task = arguments.task
    if arguments.streaming and not isinstance(train, IterableDataset):
        raise Unsupported(
            f"--streaming: train_data() of {task} must return a torch.utils.data.IterableDataset, "
            f"not a {type(train).__name__}. Remove streaming where the data has a length"
        )
    for name, data in (("eval_data", held_out), *([] if arguments.streaming else [("train_data", train)])):
        if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            hint = ": set streaming: true and max_steps for a stream" if name == "train_data" else ""
            raise Unsupported(f"{name}() of {task} must return a dataset with __len__ and __getitem__{hint}")
    if held_out is None and arguments.eval_strategy != "no":
        raise Unsupported(f"--eval_strategy {arguments.eval_strategy} needs an eval_data() of {task}")
