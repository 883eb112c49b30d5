"""Train a pickled model: the script of `cloudtrain.DistributedTraining`.

    shipped/model/      a transformers model as save_pretrained wrote it (its weights are safetensors, no pickle)
    shipped/data/       a dataset of the library datasets as save_to_disk wrote it
    shipped/parts.pkl   everything else, by cloudpickle: module, dataset, loss, optimizer, collate, communication hook
    cloudpickle/        the very version that wrote it

A pickle is code. This one was made on the user's own machine and belongs to the source of the job, as a script does;
its digest is part of the bundle's. What goes back is safetensors alone.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

# Run as a script, from .cloudtrain/trainer: `trainer` and `runtime` lie one folder above, and nothing here is a name of its own.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(HERE), *(place for place in sys.path if place not in (HERE, os.path.dirname(HERE)))]

import runtime  # noqa: E402

from trainer import collectives, publish, strategies  # noqa: E402
from trainer.errors import Unsupported, check_versions, exit_when_unsupported  # noqa: E402
from trainer.strategies import mesh  # noqa: E402

FOLDER = "shipped"


def main() -> int:
    arguments = parsed(sys.argv[1:])
    context = runtime.context()
    runtime.install()
    try:
        with exit_when_unsupported():
            check_versions()
            if context.parallelism.get("accelerate_config"):
                raise Unsupported("DistributedTraining takes no Accelerate file: leave accelerate_config out")
            plan = mesh.choose_plan(context.parallelism, context.world_size, context.num_nodes)
            if plan.strategy not in ("none", "ddp") or plan.world != plan.data_ranks:
                raise Unsupported(f"DistributedTraining trains with ddp only, not {plan.described}")
            return train(arguments, context, plan)
    except Exception:
        traceback.print_exc()
        return collectives.leave(1)  # while the frames of the traceback still hold the process group
    except SystemExit as refusal:
        return collectives.leave(int(refusal.code or 0))


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pickled.py", allow_abbrev=False)
    parser.add_argument("--num_train_epochs", type=float, default=1.0)
    parser.add_argument("--per_device_train_batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--logging_steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--samples", type=int, default=0, help="of synthetic data; 0: the data came with the job")
    parser.add_argument("--features", type=int, default=0)
    parser.add_argument("--python", default="", help="the version that pickled, 3.12 say")
    return parser.parse_args(argv)


def train(arguments: argparse.Namespace, context: runtime.RunContext, plan: mesh.ParallelismPlan) -> int:
    """Train what came with the job and return the exit code."""
    import torch
    from accelerate.utils import DistributedDataParallelKwargs, set_seed

    from trainer.checkpoints.manager import CheckpointManager
    from trainer.checkpoints.state import TrainingState, set_random_state
    from trainer.data.samples import EMPTY, GlobalBatches, loader
    from trainer.loop import Loop
    from trainer.metrics import Meter, MetricsLogger
    from trainer.strategies.ddp import Strategy

    class Counted(torch.utils.data.Dataset[Any]):
        """The data, each sample with whether it counts: a rank that has none left in the last batch gets one that does not."""

        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Any:
            return index != EMPTY, data[max(index, 0)]

    def joined(items: list[Any]) -> Any:
        return sum(counts for counts, _ in items), collate([item for _, item in items])

    class OwnLoss(Strategy):
        """Data parallel training of any module by any loss; batches are (samples that count, the user's own batch)."""

        def to_device(self, batch: Any) -> Any:
            count, own = batch
            return count, moved(own, self.device)

        def label_count(self, batch: Any) -> torch.Tensor:
            count, own = batch
            labels = labels_of(self.model, own, parts.get("loss"))
            return torch.as_tensor(count if labels is None else labels * (count > 0), device=self.device)

        def size(self, batch: Any) -> int:
            return batch[0]  # samples, not tokens

        def losses(self, batch: Any) -> torch.Tensor:
            # Weighed, so that the loss is the mean over the global batch: ranks with fewer samples, or labels, weigh less.
            return loss_of(self.model, batch[1], parts.get("loss")) * self.label_count(batch)

        def check_gradients(self) -> list[float]:
            return []  # what a communication hook leaves on the ranks is the user's choice

    # -----------------------------------------------------------------------------------------------------------------
    # What came with the job
    logger = MetricsLogger(main=context.rank == 0)
    # The modules here may have buffers that training changes (batch norm), therefore DDP's own defaults.
    accelerator = strategies.make_accelerator("no", plan, kwargs_handlers=[DistributedDataParallelKwargs()])
    strategy = OwnLoss(accelerator, plan)
    set_seed(arguments.seed)
    parts = unpacked(Path.cwd() / FOLDER, arguments)
    bare, data = parts["model"], parts["data"]
    collate = parts.get("collate") or torch.utils.data.default_collate
    batches = GlobalBatches(
        len(data), per_device=arguments.per_device_train_batch_size, accumulation=1, world=context.world_size,
        rank=context.rank, seed=arguments.seed, drop_last=False,
    )  # fmt: skip
    feed = loader(Counted(), 0, strategy.device.type == "cuda", batch_sampler=batches, collate_fn=joined)
    total_steps = max(1, math.ceil(arguments.num_train_epochs * batches.steps_per_epoch))
    logger.total_steps = total_steps

    def optimizer(module: Any) -> torch.optim.Optimizer:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if made := parts.get("optimizer"):
            return made(trained)  # type: ignore[no-any-return]
        return torch.optim.AdamW(trained, lr=arguments.learning_rate)

    strategy.prepare(bare, optimizer)
    model = strategy.model
    hook = parts.get("communication_hook")
    if hook is not None and plan.world > 1:
        model.register_comm_hook(None, hook)
    constant = torch.optim.lr_scheduler.ConstantLR(strategy.optimizer, factor=1.0)
    training = TrainingState(model, strategy.optimizer, constant)

    facts = strategy.describe()
    logger.event("world", **facts, communication_hook=getattr(hook, "__name__", None))
    logger.say(
        f"{type(bare).__name__}, {facts['parameters_per_rank'][0]:,} parameters, {len(data):,} samples; "
        f"{plan.world} x {facts['device']}, strategy {plan.described}, wrapper {facts['wrapper']}"
    )

    # -----------------------------------------------------------------------------------------------------------------
    # Checkpoints, what is reported, and where an earlier attempt left off
    folder, keep = Path(context.checkpoint_dir), context.checkpoint_keep or 3
    manager = CheckpointManager(folder, context.attempt, keep, logger.event, logger.say, given=context.epoch)
    meter = Meter(strategy.device)
    loop: Loop

    def save() -> None:
        loop.saved_step = loop.step
        manager.save(loop.step, training, {"step": loop.step, **batches.place()}, {"meter": meter.state()})

    def report(values: dict[str, float]) -> None:
        speed = values["tokens_per_s"]
        logger.metrics(loop.step, loss=values["loss"], samples_per_s=speed)
        logger.say(f"step {loop.step}/{total_steps}  loss {values['loss']:.4f}  {speed:,.0f} samples/s")

    loop = Loop(
        strategy, constant, batches, feed, meter, logger, manager, context.rank == 0, total_steps, save, report,
        arguments.logging_steps, every_steps=context.checkpoint_every_steps, every_s=context.checkpoint_every_s,
    )  # fmt: skip
    resumed = manager.resume(training)
    publish.withdraw(Path(context.model_dir), manager.epoch)
    set_seed(arguments.seed + context.rank)  # each rank drops out its own
    if resumed is not None:
        position, mine = resumed
        loop.step = position["step"]
        batches.go_to(position)
        if mine:
            meter.set_state(mine["meter"])
            set_random_state(mine["random"])

    # -----------------------------------------------------------------------------------------------------------------
    # The training (loop.py)
    if loop.run():
        logger.say(f"asked to leave: saved at step {loop.step}/{total_steps}")
        return collectives.leave(runtime.EXIT_RESUMABLE)
    if context.is_main:
        publish.save(
            getattr(model, "module", model), None, Path(context.model_dir), manager.epoch, manager.check_current
        )
        logger.say(f"model saved in {context.model_dir}")
    manager.check_ranks()
    return collectives.leave(0)


def unpacked(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what came with the job, by name; raises Unsupported where this Python cannot read it."""
    parts: dict[str, Any] = {}
    if (folder / "parts.pkl").exists():
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        if arguments.python and arguments.python != here:
            raise Unsupported(
                f"the model was pickled by Python {arguments.python}, here is {here}: use the same on both sides"
            )
        sys.path.insert(0, str(folder.parent))  # where cloudpickle lies
        with open(folder / "parts.pkl", "rb") as stream:
            parts = pickle.load(stream)
    if (folder / "model").is_dir():
        import json

        import transformers

        [name] = json.loads((folder / "model" / "config.json").read_text())["architectures"]
        parts["model"] = getattr(transformers, name).from_pretrained(folder / "model")
    if (folder / "data").is_dir():
        import datasets

        dataset = datasets.load_from_disk(str(folder / "data"))
        parts["data"] = dataset if dataset.format["type"] else dataset.with_format("torch")
    if arguments.samples:
        parts["data"] = synthetic(arguments.samples, arguments.features, arguments.seed)
    return parts


def synthetic(samples: int, features: int, seed: int) -> Any:
    """Return made-up data of two classes that a plane parts, all but some; equal on every rank."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=draw)
    plane = torch.randn(features, generator=draw)
    noise = torch.randn(samples, generator=draw) * features**0.5 * 0.1
    return torch.utils.data.TensorDataset(inputs, (inputs @ plane + noise > 0).long())


def moved(batch: Any, device: Any) -> Any:
    """Return a nested batch where the model is."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if hasattr(batch, "items"):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [moved(value, device) for value in batch]
    return batch


def loss_of(model: Any, batch: Any, loss: Any) -> Any:
    """Return the mean loss of a batch.

    A dictionary is the model's keyword arguments, its `labels` the target; of a sequence the last is the target.
    """
    if isinstance(batch, dict):
        labels = batch.get("labels")
        if loss is None and _knows_its_loss(model):
            return model(**batch).loss
        outputs, target = model(**{name: value for name, value in batch.items() if name != "labels"}), labels
    else:
        *inputs, target = batch
        outputs = model(*inputs)
    return (loss or plain_loss)(outputs, target)


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
    return ((labels[..., 1:] if causal else labels) != -100).sum()


def plain_loss(outputs: Any, target: Any) -> Any:
    """Return cross entropy for classes and the mean squared error for numbers."""
    from torch.nn import functional

    outputs = getattr(outputs, "logits", outputs)
    if not target.is_floating_point():
        return functional.cross_entropy(outputs, target)
    if outputs.shape != target.shape:  # would be broadcast, and learned wrongly without an error
        if outputs.shape != (*target.shape, 1):
            raise ValueError(f"the model gives {tuple(outputs.shape)} for targets of {tuple(target.shape)}: pass loss=")
        outputs = outputs.squeeze(-1)
    return functional.mse_loss(outputs, target)


if __name__ == "__main__":
    sys.exit(main())
