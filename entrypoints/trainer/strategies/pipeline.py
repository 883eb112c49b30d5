"""Pipeline parallelism: layers in stages, micro-batches in a schedule; stages may themselves be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from .. import collectives
from .. import model as models
from ..errors import Unsupported
from .ddp import Batch, local
from .fsdp import (
    ShardedStrategy,
    by_mesh,
    check_split,
    filled,
    materialize,
    mesh_of,
    shard,
    skeleton,
    split_layers,
    untie,
    whole_on,
)
from .stages import check_cut, cut

if TYPE_CHECKING:
    from ..arguments import Arguments
    from .mesh import ParallelismPlan


class PipelineStrategy(ShardedStrategy):
    """torch.distributed.pipelining over the mesh's first axis; FSDP2 and tensor parallelism within a stage."""

    parts_kept = "pipeline"

    def __init__(self, accelerator: Any, plan: ParallelismPlan, arguments: Arguments) -> None:
        super().__init__(accelerator, plan)
        self.microbatches = microbatches(plan, arguments.per_device_train_batch_size)
        self._schedules: dict[Any, Any] = {}
        self._labels = torch.ones(())

    def prepare(self, bare: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        plan = self.plan
        self.bare = skeleton(bare)
        check_split(bare, plan.tensor)
        check_cut(bare, plan.stages)
        self.mesh = mesh_of(plan, self.device)
        if plan.tensor > 1:
            split_layers(bare, self.mesh["tensor"])
        names = twins(bare)
        tied = untie(bare)
        self.place = plan.stage_rank(self.rank)
        # Stage s lies on rank s mod the pipeline's length: that is what interleaving means.
        indices = list(range(self.place, plan.stages, plan.pipeline))
        self.tied = names if tied and plan.stages - 1 in indices else None
        self.stages = dict(zip(indices, cut(bare, indices, plan.stages), strict=True))
        for stage in self.stages.values():
            if self._fully:
                shard(stage, stage, self.mesh, plan, str(self.accelerator.mixed_precision))
        materialize(bare, self.device, plan.offload)
        self.model = bare
        self.optimizer = by_mesh(make_optimizer(bare))
        self.stepper = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)
        self._tied_group = self._ends() if tied else None

    def _ends(self) -> Any:
        """Return the group of the two ranks that hold one embedding, the first and the last of a pipeline; None for those
        between. Collective."""
        plan, mine = self.plan, None
        step = plan.world // plan.pipeline
        for column in range(step):
            ranks = [column, column + step * (plan.pipeline - 1)]
            group = dist.new_group(ranks)
            if self.rank in ranks:
                mine = group
        return mine

    def _tied(self) -> torch.nn.Parameter | None:
        """Return this rank's part of the embedding that the first and the last stage share."""
        if self._tied_group is None:
            return None
        first = self.place == 0
        return (self.model.get_input_embeddings() if first else self.model.get_output_embeddings()).weight  # type: ignore[no-any-return]

    def held_out(self, dataset: Any, size: int, collate: Any, pinned: bool) -> Any:
        return super().held_out(dataset, self.microbatches * -(-size // self.microbatches), collate, pinned)

    # -- one step -----------------------------------------------------------------------------------------------------

    def learn(self, window: Sequence[Batch], labels: torch.Tensor) -> list[torch.Tensor]:
        self._labels = labels
        shares = [self._pass(batch, True)[0] for batch in window]
        for parameter in self.model.parameters():
            # A tensor parallel embedding leaves its gradient in another layout than it has itself.
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        if (tied := self._tied()) is not None and tied.grad is not None:
            dist.all_reduce(local(tied.grad), group=self._tied_group)
        return shares

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # FSDP takes the mean over the ranks, we want the sum.
        return models.losses(logits, labels).sum() / self._labels * self.plan.data_ranks

    def _pass(self, batch: Batch, training: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Let a batch through; return its share of the loss as `total` wants it, and the logits where the last stage is."""
        inputs = models.inputs(batch)
        ids = inputs.pop("input_ids")
        schedule = self._schedule(training, tuple(ids.shape), tuple(inputs))
        losses: list[torch.Tensor] = []
        first = [ids] if self.place == 0 else []
        with self.accelerator.autocast():
            if not training:
                logits = schedule.step(*first, **inputs)
            else:
                target = batch["labels"] if self._is_last else None
                logits = schedule.step(*first, target=target, losses=losses, return_outputs=False, **inputs)
        share = torch.zeros((), device=self.device)
        if losses:  # known to the last stage alone, which decides for all
            share = torch.stack(losses).sum().detach() / self.plan.data_ranks * self.plan.pipeline
        return share, logits

    @property
    def _is_last(self) -> bool:
        return self.place == self.plan.pipeline - 1

    def _schedule(self, training: bool, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        """Return the schedule for batches of a shape: the ranks have agreed on what they send each other."""
        key = (training, shape, names)
        if key not in self._schedules:
            group = self.mesh["pipeline"].get_group()
            made = [
                PipelineStage(each, at, self.plan.stages, self.device, group=group) for at, each in self.stages.items()
            ]
            loss = self._loss if training else None
            options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
            if self.plan.schedule == "interleaved":
                self._schedules[key] = ScheduleInterleaved1F1B(made, self.microbatches, **options)
            else:
                kind = Schedule1F1B if training and self.plan.schedule == "1f1b" else ScheduleGPipe
                self._schedules[key] = kind(made[0], self.microbatches, **options)
        return self._schedules[key]

    def clip(self, norm: float) -> torch.Tensor | float | None:
        """Clip over all stages and parts: every rank adds the squares that it holds, divided by how many hold the same."""
        gradients = [(each, each.grad) for each in self.model.parameters() if each.grad is not None]
        tied = self._tied()
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter, gradient in gradients:
            copies = self.plan.world // self.plan.pipeline // parts(gradient) * (2 if parameter is tied else 1)
            squares += local(gradient).double().square().sum() / copies
        dist.all_reduce(squares)
        total_norm = squares.sqrt()
        scale = (norm / (total_norm + 1e-6)).clamp(max=1.0)
        for _, gradient in gradients:
            local(gradient).mul_(scale.to(gradient.dtype))
        return total_norm

    def scores(self, batch: Batch) -> torch.Tensor:
        _, logits = self._pass(batch, False)
        mine = torch.zeros(1, 3, dtype=torch.float64, device=self.device)
        if logits is not None:
            mine = models.scored(logits, batch["labels"]).sum(0, keepdim=True) * self.plan.pipeline
        return self.total(mine)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def check(self) -> str:
        placements = self.placements()
        for stage in self.stages.values():
            if self._fully and not isinstance(stage, FSDPModule):
                raise Unsupported(f"{self.plan.described}: FSDP should wrap every stage")
        if self.plan.shard > 1 and "whole" in placements:
            raise Unsupported(
                f"{self.plan.described}: {placements['whole']:,} parameters are not sharded: every rank has a full copy"
            )
        return "PipelineStage(FSDP2)" if self._fully else "PipelineStage"

    def describe(self) -> dict[str, Any]:
        stages = collectives.every_rank(list(self.stages))[:256]
        return {
            **super().describe(),
            "schedule": self.plan.schedule,
            "microbatches": self.microbatches,
            "stages": stages,
        }

    runs_whole = False

    @property
    def _leads(self) -> bool:
        """Whether this rank speaks for its stages."""
        return self.rank % (self.plan.world // self.plan.pipeline) == 0

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        self.reshard()
        state, group = self.model.state_dict(), collectives.cpu_group()
        mine = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} if self._leads else {}
        holders: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for rank, theirs in enumerate(collectives.every_rank(mine)):
            for name, (shape, dtype) in theirs.items():
                holders.setdefault(name, (rank, shape, dtype))
        for name in names:
            holder, shape, dtype = holders[name]
            full = whole_on(self.rank in (0, holder), state[name]) if name in state else None
            if holder != 0 and self.rank == holder and full is not None:
                dist.send(full.contiguous(), 0, group=group)
            elif holder != 0 and self.rank == 0:
                full = torch.empty(shape, dtype=dtype)
                dist.recv(full, holder, group=group)
            yield name, full if self.rank == 0 else None
            del full

    def whole(self) -> Any:
        held = collectives.every_rank(list(self.model.state_dict()) if self._leads else [])
        state = dict(self.tensors(list(dict.fromkeys(name for names in held for name in names))))
        return filled(self.bare, state) if self.rank == 0 else None

    def reshard(self) -> None:
        """Let FSDP put back what an evaluation left whole."""
        for stage in self.stages.values():
            if isinstance(stage, FSDPModule):
                stage.reshard()


def twins(model: Any) -> tuple[str, str] | None:
    """Return the names of the output embedding and of the input embedding that is the same matrix."""
    matrix = model.get_input_embeddings().weight
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is matrix]
    return (names[-1], names[0]) if len(names) == 2 else None


def microbatches(plan: ParallelismPlan, batch: int) -> int:
    """Return in how many pieces a batch goes through the pipeline; raises Unsupported when it cannot be cut so."""
    fits = [
        count
        for count in range(1, batch + 1)
        if batch % count == 0
        and (plan.schedule != "1f1b" or count >= plan.pipeline)
        and (plan.schedule != "interleaved" or count % plan.pipeline == 0)
    ]
    if plan.microbatches in fits:
        return plan.microbatches
    asked = f"microbatches {plan.microbatches}" if plan.microbatches else f"a pipeline of {plan.pipeline}"
    possible = f"use {', '.join(map(str, fits))}" if fits else "it needs a larger batch"
    if plan.microbatches or not fits:
        raise Unsupported(f"--per_device_train_batch_size {batch} does not suit {asked} ({plan.schedule}): {possible}")
    # Twice the stages leave a third of the time for waiting; more pieces are smaller ones.
    return next((count for count in fits if count >= 2 * plan.pipeline), fits[-1])


def parts(tensor: torch.Tensor) -> int:
    """Return over how many ranks the elements of a tensor are dealt out."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(tensor.placements):
        count *= tensor.device_mesh.size(axis) if placement.is_shard() else 1
    return count
