"""Task, the trainer's interface to what is learned.

A built-in task is a class of this interface, and its name is short for `module:Class` (kinds.py). A class of the source
(`--task mypkg.task:MyTask`) may derive from one. Any other is wrapped in CustomTask (custom.py).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import collectives, generate, lora
from .. import model as models
from ..argument_rules import task_problems
from ..errors import Unsupported
from ..kinds import BUILT_IN, Kind
from .samples import Item
from .stream import StreamBatches

if TYPE_CHECKING:
    from ..arguments import Arguments

WRAPPER = "trainer.data.custom:CustomTask"

Samples = Any  # Blocks, Rows, Turns; a stream's Texts, which have no length


@dataclass
class Task(Kind):
    """Samples, what they are learned by, and what belongs to them; equal on every rank.

    The loss of this class is that of labels. What a rank has of the model, or of a sequence, is enough for it.
    """

    tokenizer: Any
    train: Samples
    held_out: Samples | None
    collate: Callable[[list[Item]], Item]
    labels: list[str] = field(default_factory=list)
    described: str = ""
    predicted: list[dict[str, Any]] = field(default_factory=list)  # of this rank's held-out samples, a batch each
    table: list[dict[str, Any]] = field(default_factory=list)  # rows of `samples`, of the newest evaluation
    unit: ClassVar[str] = "tokens"  # of `size`
    wraps: ClassVar[bool] = False  # it stands for a class of the source that does not derive from this one

    @classmethod
    def prepare(cls, arguments: Arguments, inputs: Mapping[str, str]) -> Task:
        """Return the task with its samples; collective. Raises Unsupported for data that cannot be trained on."""
        raise NotImplementedError

    def model(self, arguments: Arguments) -> torch.nn.Module:
        """Return the model, the same on every rank; it may be without values yet (weights.py)."""
        if arguments.use_peft and not arguments.model:
            raise Unsupported("--use_peft adapts a pretrained model: set --model")
        return models.outline(arguments, self.tokenizer, self.labels)

    def parameter_groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """Return groups for AdamW with every parameter that is trained; none: weight decay on matrices only."""
        return []

    def optimizer(self, model: torch.nn.Module, arguments: Arguments) -> torch.optim.Optimizer:
        """Return AdamW of the parameter groups, or of all that is trained.

        Raises Unsupported where a parameter that is trained is in no group.
        """
        groups = [{**group, "params": list(group["params"])} for group in self.parameter_groups(model)]
        if not groups:
            return models.optimizer(model, arguments)
        grouped = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in grouped:
                raise Unsupported(
                    f"parameter_groups() of {arguments.task} leaves out {name}: add it to a group, or set its "
                    "requires_grad to False in model()"
                )
        return models.optimizer(model, arguments, groups)

    def prepared(self, strategy: Any) -> None:
        """Use the model as the strategy has wrapped it, before the first step and before a checkpoint is read. Collective."""

    @property
    def of_labels(self) -> bool:
        """Whether loss and scores are those of this class for tokens: a part of the logits at a time is enough for them."""
        return self.writes and type(self).losses is Task.losses and type(self).scores is Task.scores

    @property
    def gathers(self) -> bool:
        """Whether the predictions of held-out samples are kept, for `metrics` and `samples`."""
        return type(self).predictions is not Task.predictions

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
        logits = model(**models.inputs(batch)).logits
        self.keep(model, logits, batch)
        return models.scored(logits, batch["labels"])

    def keep(self, model: Any, outputs: Any, batch: Any) -> None:
        """Keep the predictions of a batch of an evaluation, if any sample in it counts; `scores` calls it."""
        if self.gathers and int(self.count(model, batch)) > 0:
            self.predicted.append(moved(self.predictions(outputs, batch), "cpu"))

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
        """Return tensors or lists by name, one row for each sample; `outputs` are the logits of the whole batch."""
        raise NotImplementedError

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Return the results of an evaluation by name, made of the sums of all rows."""
        loss, count, right = sums
        results = {"eval_loss": loss / max(count, 1)}
        return results | {"eval_accuracy": right / max(count, 1)} if self.labels else results

    @property
    def generates(self) -> bool:
        """Whether the trained model writes texts, rows of the table `samples`."""
        return self.writes and self.tokenizer is not None

    def generate(self, model: Any, prompt: str, tokens: int, seed: int) -> str:
        """Return the text that the trained model makes of a prompt, of at most so many tokens."""
        return generate.sample(model, self.tokenizer, prompt, tokens, seed, self.chats)

    def metrics(self, predictions: Mapping[str, Any]) -> dict[str, float]:
        """Return more results by name, of the predictions of all held-out samples."""
        return {}

    def samples(self, predictions: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows for the table `predictions`."""
        return []


class LossOfLabels:
    """For a kind of task with a loss of its own: a language model's by the labels of its batches, which strategies spread."""

    writes: ClassVar[bool] = True
    unit: ClassVar[str] = "tokens"
    to_device, count, size = Task.to_device, Task.count, Task.size
    losses, scores, summary = Task.losses, Task.scores, Task.summary


def moved(batch: Any, device: Any) -> Any:
    """Return a nested batch where the model is."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if hasattr(batch, "items"):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [moved(value, device) for value in batch]
    return batch


def weighed(loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return a mean loss times what it is the mean of: 0 where that is nothing, of which the mean is not a number."""
    return torch.where(count > 0, loss, 0.0) * count


def load_class(name: str) -> Any:
    """Return the class that `module:Class` names, from the source; raises Unsupported where it is not there."""
    module, _, own = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(1, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise Unsupported(f"--task {name}: there is no module {error.name} in the source") from None
    if not hasattr(found, own):
        raise Unsupported(f"--task {name}: the module {module} has no {own}")
    return getattr(found, own)


def options(pairs: list[str]) -> dict[str, Any]:
    """Return the options of name=value pairs; a value is JSON, or else text."""
    made = {}
    for name, _, text in (pair.partition("=") for pair in pairs):
        try:
            made[name] = json.loads(text)
        except ValueError:
            made[name] = text
    return made


def task_class(name: str) -> type[Task]:
    """Return the class of a task, built in or of the source; one that wraps it where it does not derive from Task."""
    found = load_class(BUILT_IN[name].path if name in BUILT_IN else name)
    if isinstance(found, type) and issubclass(found, Task):
        return found
    said = {"own_arguments": getattr(found, "own_arguments", None)}
    return type(found.__name__, (load_class(WRAPPER),), said)


def prepare(arguments: Arguments, inputs: Mapping[str, str]) -> Task:
    """Return the task with its samples; collective. Raises Unsupported when ranks would not see the same."""
    kind = task_class(arguments.task)
    arguments.kind = kind
    if problems := task_problems(arguments):
        raise Unsupported(problems[0])
    task = kind.prepare(arguments, inputs)
    if not task.wraps:
        for name, value in options(arguments.task_args).items():
            if not hasattr(task, name):
                raise Unsupported(f"--task_args {name}: the class {kind.__name__} has no attribute {name}")
            setattr(task, name, value)
    if task.held_out is not None and len(task.held_out) == 0:
        task.held_out = None
    data = [("training data", task.train), ("held-out data", task.held_out)]
    if arguments.streaming:
        del data[0]  # nothing of a stream is read before it is needed
    elif len(task.train) == 0:
        raise Unsupported("there is nothing to train on: the training data has no rows. Check dataset and its files")
    for name, samples in data:
        collectives.check_same(name, "" if samples is None else samples.fingerprint())
    return task


def build_model(task: Task, arguments: Arguments) -> torch.nn.Module:
    """Return the model of a task, with an adapter where one is asked for; collective."""
    model = task.model(arguments)
    if arguments.use_peft and not lora.is_adapted(model):
        return lora.put_on(model, arguments)
    return model
