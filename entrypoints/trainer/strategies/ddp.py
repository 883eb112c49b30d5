"""Strategy, the training loop's interface; this one is for one process and for DDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from .. import chunked_loss, collectives, weights
from .. import model as models
from ..data.samples import GlobalBatches, loader
from ..errors import Unsupported
from . import context_parallel

if TYPE_CHECKING:
    from ..data.tasks import Task
    from .mesh import ParallelismPlan

Batch = dict[str, torch.Tensor]


class Strategy:
    """Accelerate around the model. Other strategies are subclasses that say what they do differently."""

    model: Any
    optimizer: torch.optim.Optimizer  # the bare one, which schedules and checkpoints know
    stepper: Any  # Accelerate's
    parts_kept = ""  # how checkpoints hold what lies in parts (snapshot.Training.parts)
    tied: tuple[str, str] | None = None  # snapshot.Training.tied
    bare: Any = None  # the model without values; None where the whole is saved from rank 0's
    chunked: chunked_loss.ChunkedLoss | None = None  # None: the logits are whole
    task: Task  # whose loss is minimised

    def __init__(self, accelerator: Any, plan: ParallelismPlan) -> None:
        self.accelerator, self.plan = accelerator, plan
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.context = context_parallel.of(plan, self.rank)

    # -- before training ----------------------------------------------------------------------------------------------

    def prepare(self, bare: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        """Spread the model, which is the same on every rank; raises Unsupported when that cannot be done. Collective."""
        weights.fill(bare, self.device)
        if self.context is not None:
            self.context.put_on(bare)
        self.chunked = chunked_loss.of(bare, self.plan.tensor) if self.task.of_labels else None
        self.optimizer = make_optimizer(bare)
        self.model, self.stepper = self.accelerator.prepare(bare, self.optimizer)

    def held_out(self, dataset: Any, size: int, collate: Any, pinned: bool) -> Any:
        """Return the batches of an evaluation, of so many samples on a rank."""
        rank, ranks = self.plan.data_rank(self.rank), self.plan.data_ranks
        batches = GlobalBatches(len(dataset), size, 1, ranks, rank, 0, False, full=ranks < self.plan.world)
        return loader(dataset, 0, pinned, batch_sampler=batches, collate_fn=collate)

    def settle(self, loss: Callable[[], Any]) -> None:
        """Go through one loss of no meaning, where the first step of a resumed run needs it; collective."""
        settle_buckets(self.model, loss)
        self.stepper.zero_grad()

    # -- one step -----------------------------------------------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        """Return the batch where the model is; the host does not wait for the copy."""
        return self.task.to_device(batch, self.device)

    def label_count(self, batch: Any) -> torch.Tensor:
        """Return how many labels of a batch count in the loss."""
        return self.task.count(self.model, batch)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all samples' ranks, on every rank; collective."""
        summed: torch.Tensor = self.accelerator.reduce(tensor, reduction="sum")
        copies = self.plan.world // self.plan.data_ranks  # ranks that count the same samples
        if copies == 1:
            return summed
        return summed / copies if summed.is_floating_point() else summed // copies

    def learn(self, window: Sequence[Batch], labels: torch.Tensor) -> list[torch.Tensor]:
        """Go forward and backward through the micro-batches of a step and return the share of its loss that each has.

        `labels` is the number of those that count in the global batch: the loss is the mean over them. Collective.
        """
        shares = []
        for number, batch in enumerate(window, 1):
            with self.accumulating(number < len(window)):
                share = self.losses(batch).sum() / labels
                # The wrapper takes the mean over the ranks, we want the sum.
                self.accelerator.backward(share * self.plan.gradient_ranks)
            shares.append(share.detach() * self.plan.context)  # a part of it; `total` takes it for the whole
        return shares

    def losses(self, batch: Batch) -> torch.Tensor:
        """Return the loss of each sample, or of this rank's part of it; of all together where it is made in chunks."""
        if self.chunked is not None:
            return self.chunked.losses(self.model, self.part(batch), summed=True)
        return self.task.losses(self.model, self.part(batch))

    def part(self, batch: Batch) -> Batch:
        """Return the samples, or this rank's part of them."""
        return batch if self.context is None else self.context.part(batch)

    def accumulating(self, more: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch; `more` of the same step follow it."""
        return self.accelerator.no_sync(self.model) if more else nullcontext()  # type: ignore[no-any-return]

    def clip(self, norm: float) -> torch.Tensor | float | None:
        """Clip the whole model's gradients to a norm and return the one that they had; collective."""
        total_norm: torch.Tensor | float | None = self.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        return total_norm

    def step(self) -> bool:
        """Let the optimizer do its step and return whether it did: fp16 may find its scale too high."""
        self.stepper.step()
        self.stepper.zero_grad()
        return not self.stepper.step_was_skipped

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def scores(self, batch: Batch) -> torch.Tensor:
        """Return the row of `Task.scores` for this batch of all ranks, no sample counted twice. Collective."""
        if self.chunked is not None and not self.task.gathers:  # predictions are made of whole logits
            batch = self.part(batch)
            losses = self.chunked.losses(self.model, batch, summed=False)
            counted = models.counted(batch["labels"])
            mine = torch.stack([losses, counted, torch.zeros_like(losses)], dim=1).double()
        else:
            mine = self.task.scores(self.model, self.part(batch))
        return self.total(mine.sum(0, keepdim=True) * self.plan.context)

    def gather(self, predictions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the predictions of all ranks, each sample's once; collective."""
        first = all(self.plan.data_rank(rank) != self.plan.data_rank(self.rank) for rank in range(self.rank))
        mine = predictions if first else []  # others have the same samples
        gathered: list[dict[str, Any]] = self.accelerator.gather_for_metrics(mine, use_gather_object=True)
        return gathered

    # -- what it is ---------------------------------------------------------------------------------------------------

    def check(self) -> str:
        """Return in what the model is wrapped; raises Unsupported unless the strategy is what runs."""
        expected = "DistributedDataParallel" if self.plan.world > 1 else None
        wrapper = type(self.model).__name__
        if (wrapper if hasattr(self.model, "module") else None) != expected:
            raise Unsupported(f"strategy {self.plan.strategy} should wrap the model in {expected}, it is a {wrapper}")
        return expected or "none"

    def describe(self) -> dict[str, Any]:
        """Return the world as it really is, for the `world` event; raises Unsupported where it is another. Collective."""
        if self.context is not None:
            self.context.check(self.device, str(self.accelerator.mixed_precision))
            self.reshard()
        here = [held for _, _, held in self.parts()]
        mine = sum(here), sum(compress(here, (each.requires_grad for each in self.model.parameters())))
        held, learned = zip(*collectives.every_rank(mine), strict=True)
        return {
            "world_size": self.accelerator.num_processes,
            "strategy": self.plan.strategy,
            "mesh": self.plan.mesh,
            "wrapper": self.check(),
            "placements": self.placements(),
            "parameters_per_rank": list(held[:256]),
            "learned_per_rank": list(learned[:256]),
            "device": self.device.type,
            "mixed_precision": str(self.accelerator.mixed_precision),
        }

    def placements(self) -> dict[str, int]:
        """Return how many parameters lie in which way over the mesh, in this rank's part of the model."""
        counts: dict[str, int] = {}
        for placement, count, _ in self.parts():
            counts[placement] = counts.get(placement, 0) + count
        return counts

    def parts(self) -> list[tuple[str, int, int]]:
        """Return for each parameter how it lies over the mesh, its size, and how much of it this rank holds."""
        parts = []
        for parameter in self.model.parameters():
            placement = "whole"
            if isinstance(parameter, torch.distributed.tensor.DTensor):
                names = parameter.device_mesh.mesh_dim_names or ()
                placement = " ".join(f"{name}:{how}" for name, how in zip(names, parameter.placements, strict=True))
            parts.append((placement, parameter.numel(), local(parameter).numel()))
        return parts

    def check_gradients(self) -> list[float]:
        """Return every rank's norm of its own gradients; raises RuntimeError unless ranks that hold the same parameters
        have the same: a wrapper that leaves one out trains several models without a warning. Collective."""
        if self.plan.world == 1:
            return []
        mine = torch.zeros(2, dtype=torch.float64)  # all, and those that tensor parallel ranks have in common
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                square = local(parameter.grad).double().square().sum().cpu()
                mine += torch.stack([square, square if not split(parameter, "tensor") else torch.zeros_like(square)])
        norms = collectives.every_rank(mine.sqrt().tolist())
        plan, whole = self.plan, {}
        for rank, (norm, common) in enumerate(norms):
            stage, part = plan.stage_rank(rank), rank // plan.tensor % plan.parts
            for key, value in (((stage, part, rank % plan.tensor), norm), ((stage, part), common)):
                first, reference = whole.setdefault(key, (rank, value))
                if math.isfinite(reference) and not abs(reference - value) <= 1e-3 * max(reference, value):
                    raise RuntimeError(
                        f"ranks {first} and {rank} hold the same parameters, but their gradients differ "
                        f"(norms {reference:.6g} and {value:.6g}): strategy {plan.described} is not what runs"
                    )
        return [norm for norm, _ in norms]

    def seen(self) -> dict[str, Any]:
        """Return what the ranks have seen in their newest step, where they share sequences; collective."""
        if self.context is None:
            return {}
        ranks = collectives.every_rank(self.context.seen)[:256]
        return {
            "tokens_per_rank": [rank["tokens"] for rank in ranks],
            "keys_per_rank": [rank["keys"] for rank in ranks],
        }

    def reshard(self) -> None:
        """Give back what a forward pass left whole."""

    runs_whole = True  # whether each rank can run the model, alone or together with the others

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Return tensors of the trained model, whole and on the CPU on rank 0, None elsewhere; collective.

        One at a time: each is let go of before the next one is gathered.
        """
        state = self.accelerator.unwrap_model(self.model).state_dict()
        for name in names:
            yield name, state[name].detach().cpu() if self.rank == 0 else None

    def whole(self) -> Any:
        """Return the trained model as a plain one on rank 0, None elsewhere; collective."""
        if self.context is not None:
            self.context.take_off()
        return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False) if self.rank == 0 else None


def settle_buckets(model: Any, loss: Callable[[], Any]) -> None:
    """Let DDP find the order of its buckets, as it does in the first step of all; gradients are to be zeroed after it.

    A resumed run begins with other buckets than the unbroken one has by then, and with three ranks or more the order of
    a sum, and so its last bit, depends on them. Collective.
    """
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        loss().backward()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def split(tensor: torch.Tensor, axis: str) -> bool:
    """Return whether ranks of an axis hold different parts of a tensor."""
    if not isinstance(tensor, torch.distributed.tensor.DTensor) or axis not in (
        tensor.device_mesh.mesh_dim_names or ()
    ):
        return False
    return tensor.placements[(tensor.device_mesh.mesh_dim_names or ()).index(axis)].is_shard()
