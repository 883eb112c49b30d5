"""Sharded parameters: FSDP2, tensor parallelism by transformers' plans, and both together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from .. import chunked_loss, lora, weights
from ..errors import Unsupported
from ..weights import skeleton
from .ddp import Strategy
from .mesh import check_division

if TYPE_CHECKING:
    from .mesh import ParallelismPlan


class ShardedStrategy(Strategy):
    """DTensors on one mesh. Accelerate does the rest: precision, clipping across meshes, metrics, trackers."""

    parts_kept = "sharded"

    def prepare(self, bare: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.bare = skeleton(bare)
        check_split(bare, self.plan.tensor)
        self.mesh = mesh_of(self.plan, self.device)
        if self.plan.tensor > 1:
            split_layers(bare, self.mesh["tensor"])
        if self.context is not None:
            self.context.put_on(bare)
        self.chunked = chunked_loss.of(bare, self.plan.tensor) if self.task.of_labels else None
        if self._fully:
            shard(bare, bare, self.mesh, self.plan, str(self.accelerator.mixed_precision))
            if lora.is_adapted(bare) and hasattr(bare, "generate"):
                # It calls the model below, past the root's own hooks.
                register_fsdp_forward_method(bare, "generate")
        materialize(bare, self.device, self.plan.offload)
        # In this mode it puts on nothing but the precision: it would wrap the model in DDP.
        self.model = self.accelerator.prepare_model(bare, device_placement=False, evaluation_mode=True)
        self.optimizer = by_mesh(make_optimizer(self.model))
        self.stepper = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)

    @property
    def _fully(self) -> bool:
        return self.plan.gradient_ranks > 1 or self.plan.strategy in ("fsdp", "hsdp")

    def accumulating(self, more: bool) -> AbstractContextManager[Any]:
        # Gradients are reduced to their parts after every micro-batch, which costs no memory; replicas wait for the last.
        if self._fully:
            self.model.set_requires_all_reduce(not more)
        return nullcontext()

    def settle(self, loss: Callable[[], Any]) -> None:
        pass

    def check(self) -> str:
        placements = self.placements()
        for axis, length in (("shard", self.plan.parts), ("tensor", self.plan.tensor)):
            parts = sum(
                count
                for placement, count in placements.items()
                if f"{axis}:S" in placement or f"{axis}:_S" in placement
            )
            if length > 1 and parts == 0:
                raise Unsupported(f"{self.plan.described}: no parameter is sharded on the axis {axis}")
        if self._fully and not isinstance(self.model, FSDPModule):
            raise Unsupported(
                f"{self.plan.described}: FSDP should wrap the model, but it is a {type(self.model).__name__}"
            )
        if self.plan.parts > 1 and "whole" in placements:
            raise Unsupported(
                f"{self.plan.described}: {placements['whole']:,} parameters are not sharded: every rank has a full copy"
            )
        return "FSDP2" if self._fully else "DTensor"

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        self.reshard()
        state = self.model.state_dict()
        for name in names:
            yield name, whole_on(self.rank == 0, state[name])

    def whole(self) -> Any:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        self.reshard()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        return filled(self.bare, state) if self.rank == 0 else None

    def reshard(self) -> None:
        """Let FSDP put back what an evaluation left whole."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def whole_on(here: bool, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor whole and on the CPU, or None where it is not wanted; collective over the tensor's mesh."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu() if here else None


def mesh_of(plan: ParallelismPlan, device: torch.device) -> DeviceMesh:
    """Return the mesh over which parameters lie; collective.

    To them, ranks that share sequences are like any others: more shards, or replicas where there are none.
    """
    replicas = plan.gradient_ranks // plan.parts
    lengths = (plan.pipeline, replicas, plan.parts, plan.tensor)
    return init_device_mesh(device.type, lengths, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))


def materialize(model: Any, device: torch.device, offload: bool = False) -> None:
    """Give this rank's part of the model its values where it has none, and put it where it is trained."""
    if "initial_weights" in vars(model):
        weights.fill(model, device, offload)
    elif not offload:
        model.to(device)


def filled(made: Any, state: dict[str, torch.Tensor]) -> Any:
    """Put these weights into a model without any, on the CPU, and return it."""
    shared: dict[int, list[str]] = {}
    for name, parameter in made.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    for names in shared.values():  # one tensor of several names may have arrived under one of them
        tensor = next(state[name] for name in names if name in state)
        if tensor.untyped_storage().nbytes() > tensor.nbytes:  # unequal shards were gathered with room between them
            tensor = tensor.clone()
        state |= dict.fromkeys(names, tensor)
    made.load_state_dict(state, assign=True)
    for first, *others in shared.values():
        for name in others:
            module, _, own = name.rpartition(".")
            setattr(made.get_submodule(module), own, made.get_parameter(first))
    return made.eval()


def check_split(model: Any, size: int) -> None:
    """Raise Unsupported unless the model's layers can be split over so many ranks. Before the first collective: ranks that
    leave would let down others that wait."""
    if size == 1:
        return
    config = model.config
    if not model.tp_plan or not any(name.endswith("q_proj") for name in model.tp_plan):
        raise Unsupported(
            f"tp_size {size}: transformers has no tensor parallel plan for {config.model_type}; "
            "remove tp_size, or set the strategy fsdp"
        )
    heads = config.num_attention_heads
    counts = {
        "attention heads": heads,
        "key and value heads": getattr(config, "num_key_value_heads", None) or heads,
        "feed-forward columns": getattr(config, "intermediate_size", None) or size,
        "tokens of the vocabulary": config.vocab_size,
    }
    check_division(size, counts)


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Lay the model's matrices out over the ranks as transformers' plan for its family says."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    tied = untie(model)
    apply_tensor_parallelism(model, mesh, plan)
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def untie(model: Any) -> bool:
    """Give the output embedding a parameter of its own, on the same memory; return whether it had none."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach())
    return True


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that repeat: the parts of which one at a time is whole in memory."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return []
    largest = max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))
    return [block for block in largest if any(True for _ in block.parameters())]


def shard(root: Any, holder: nn.Module, mesh: DeviceMesh, plan: ParallelismPlan, precision: str) -> None:
    """Apply FSDP2 to the layers of `holder` and to `root`, which has the rest (tied embeddings among it)."""
    data = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    policy: dict[str, Any] = {}
    if precision == "bf16":
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if plan.offload:
        policy["offload_policy"] = CPUOffloadPolicy()
    units = blocks(holder)
    classes = {type(block).__name__ for block in units}
    if plan.wrapped and classes != {name.strip() for name in plan.wrapped.split(",")}:
        raise Unsupported(
            f"the Accelerate file wraps {plan.wrapped}, the layers of this model are {', '.join(sorted(classes))}"
        )
    for block in units:
        fully_shard(block, mesh=data, **policy)
    fully_shard(root, mesh=data, **policy)


def by_mesh(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Part the optimizer's groups by mesh: one fused operation takes tensors of one kind only."""
    groups = []
    for group in optimizer.param_groups:
        kinds: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        groups += [{**group, "params": members} for members in kinds.values()]
    optimizer.param_groups = groups
    return optimizer
