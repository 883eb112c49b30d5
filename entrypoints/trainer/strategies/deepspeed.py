"""DeepSpeed ZeRO 1, 2 and 3, through Accelerate."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from .. import collectives, weights
from ..errors import Unsupported
from ..weights import skeleton
from .ddp import Batch, Strategy
from .fsdp import filled

if TYPE_CHECKING:
    from ..arguments import Arguments
    from .mesh import ParallelismPlan


LOOSE_BYTES = 1 << 26  # of whole parameters between two calls of `_give_back_memory`


def options(plan: ParallelismPlan, arguments: Arguments) -> dict[str, Any]:
    """Return Accelerate's options; raises Unsupported without DeepSpeed."""
    if find_spec("deepspeed") is None:
        raise Unsupported(f"strategy {plan.strategy} needs DeepSpeed (pip install 'cloudtrain[deepspeed]')")
    from accelerate.utils import DeepSpeedPlugin

    stage = int(plan.strategy.removeprefix("zero"))
    offload = {"device": "cpu"} if plan.offload else {"device": "none"}
    shared: dict[str, Any] = {"stage": stage, "offload_optimizer": offload}
    if stage == 3:
        # With a threshold of 0 no parameter stays whole, however small.
        shared |= {"offload_param": offload, "stage3_param_persistence_threshold": 0}
        shared["stage3_gather_16bit_weights_on_model_save"] = True
    config = {
        "zero_optimization": shared,
        "gradient_clipping": arguments.max_grad_norm,
        "gradient_accumulation_steps": 1,  # the loop says which micro-batch is a step's last
        "train_micro_batch_size_per_gpu": arguments.per_device_train_batch_size,
        "zero_allow_untested_optimizer": True,  # a task may make its own
        "zero_force_ds_cpu_optimizer": False,  # torch's own AdamW does it, and needs no compiler
        "steps_per_print": 1 << 40,
    }
    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)}


def forget() -> None:
    """Let transformers make models as ever: when it knows of ZeRO 3 it draws other first weights, and gathers in between."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _give_back_memory() -> None:
    """Return to the system what whole parameters have left free between their shards, where the C library can (glibc)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class DeepSpeedStrategy(Strategy):
    """The engine keeps gradients and optimizer state in parts, and parameters too in stage 3; it clips and steps itself."""

    parts_kept = "deepspeed"

    def __init__(self, accelerator: Any, plan: ParallelismPlan) -> None:
        super().__init__(accelerator, plan)
        forget()

    def prepare(self, bare: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.bare = skeleton(bare)
        if self.plan.strategy == "zero3" and (values := weights.take(bare)) is not None:
            optimizer = self._load_shards(bare, values, make_optimizer)
            super().prepare(bare, lambda _: optimizer)
            return
        weights.fill(bare, torch.device("cpu"))  # the engine moves what stays on the device
        super().prepare(bare, make_optimizer)

    def _load_shards(
        self, bare: Any, values: weights.Weights, make_optimizer: Callable[[Any], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Give a model without values this rank's shards, one parameter after the other, and return its optimizer.

        The engine would take a whole model apart itself, in the same way. Collective.
        """
        from deepspeed.runtime.zero import Init

        dtype = torch.bfloat16 if str(self.accelerator.mixed_precision) == "bf16" else None
        found = list(values.each(bare, dtype, self.device))
        # Before they are sharded: their shapes, by which they are put into groups, are gone then.
        optimizer = make_optimizer(bare)
        first, load = found[0]
        first.data = load()
        holder = torch.nn.Module()
        holder.register_parameter("first", first)
        Init(holder, config_dict_or_path=self.accelerator.state.deepspeed_plugin.deepspeed_config, dtype=first.dtype)
        loose = 0
        for parameter, load in found[1:]:
            parameter.data = load()
            loose += parameter.nbytes
            first.convert_to_zero_parameters(param_list=[parameter])
            if loose > LOOSE_BYTES:
                _give_back_memory()
                loose = 0
        _give_back_memory()
        return optimizer

    def settle(self, loss: Callable[[], Any]) -> None:
        pass

    def learn(self, window: Sequence[Batch], labels: torch.Tensor) -> list[torch.Tensor]:
        shares = []
        for number, batch in enumerate(window, 1):
            share = self.losses(batch).sum() / labels
            self.accelerator.sync_gradients = number == len(window)  # then the engine clips and steps at once
            self.accelerator.backward(share * self.plan.data_ranks)
            shares.append(share.detach())
        return shares

    def check(self) -> str:
        engine = self.accelerator.deepspeed_engine_wrapped.engine
        stage, asked = engine.zero_optimization_stage(), int(self.plan.strategy.removeprefix("zero"))
        if stage != asked or engine.dp_world_size != self.plan.world:
            raise Unsupported(
                f"strategy {self.plan.strategy}: DeepSpeed runs stage {stage} over {engine.dp_world_size} ranks"
            )
        return type(self.model).__name__

    def check_gradients(self) -> list[float]:
        return []  # the engine has used them up

    def describe(self) -> dict[str, Any]:
        optimizer = self.stepper.optimizer
        whole = self.plan.strategy != "zero3"
        kept = True if not whole else bool(optimizer.partition_gradients)
        flat = optimizer.single_partition_of_fp32_groups if whole else optimizer.fp32_partitioned_groups_flat
        state = collectives.every_rank(sum(part.numel() for part in flat))[:256]
        return {**super().describe(), "optimized_per_rank": state, "gradients_in_parts": kept}

    def parts(self) -> list[tuple[str, int, int]]:
        if self.plan.strategy != "zero3":
            return super().parts()
        return [("shard:flat", each.ds_numel, each.ds_tensor.ds_numel) for each in self.model.parameters()]

    def tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        # From here on the ranks write together, and transformers would gather parameters itself.
        forget()
        module = self.model.module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        like = self.bare.state_dict()
        replicas = self.plan.strategy != "zero3"
        for name in names:
            if (parameter := parameters.get(name)) is None:
                full = buffers[name]
            elif replicas and parameter.dtype == like[name].dtype:
                full = parameter.data.clone()  # a view of one buffer, which no file takes
            elif parameter.requires_grad:  # what the optimizer has, in bf16 too
                full = safe_get_full_fp32_param(parameter)
            elif replicas:
                full = parameter.data
            else:
                with GatheredParameters([parameter]):
                    full = parameter.data.clone()
            yield name, full.detach().to("cpu", like[name].dtype) if self.rank == 0 else None
            del full

    def whole(self) -> Any:
        if self.plan.strategy != "zero3":
            if self.rank:
                return None
            for parameter in self.model.module.parameters():  # views of one buffer, which no file takes
                parameter.data = parameter.data.clone()
            return self.model.module
        state = self.accelerator.get_state_dict(self.model)
        # From here on rank 0 is alone with the model, and transformers would gather parameters from the others.
        forget()
        return filled(self.bare, {name: tensor.cpu() for name, tensor in state.items()}) if self.rank == 0 else None
