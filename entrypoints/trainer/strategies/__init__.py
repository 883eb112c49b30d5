"""Parallelism strategies: what the job asks for becomes DDP, FSDP, DeepSpeed ZeRO or a pipeline around the model.

Without a GPU Accelerate falls back to independent processes and prints no warning. Therefore the world is checked before
anything else is done, and what the strategy made of the model after that.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from ..errors import Unsupported

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..arguments import Arguments
    from .ddp import Strategy
    from .mesh import ParallelismPlan


def build_strategy(plan: ParallelismPlan, arguments: Arguments, **options: Any) -> Strategy:
    """Return what carries the layout, in the world that the launcher promised; raises Unsupported in any other one."""
    import torch

    mixed_precision = arguments.mixed_precision
    if mixed_precision == "no":  # unless the job's environment says more
        mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # The layout says it: Accelerate would wrap the model a second time, or in something else.
    for name in ("USE_FSDP", "USE_DEEPSPEED", "USE_PARALLELISM_CONFIG", "CONFIG_DS_FIELDS"):
        os.environ.pop(f"ACCELERATE_{name}", None)
    if mixed_precision == "fp16" and plan.carrier != "accelerate":
        raise Unsupported(f"--fp16 works with strategies none and ddp only, not with {plan.described}; use --bf16")
    if plan.offload and plan.carrier != "deepspeed" and not torch.cuda.is_available():
        raise Unsupported("parallelism.offload moves memory from GPUs, but the job has no GPU: remove it")
    if plan.carrier == "deepspeed":
        from . import deepspeed

        return deepspeed.DeepSpeedStrategy(
            make_accelerator(mixed_precision, plan, arguments, **deepspeed.options(plan, arguments), **options), plan
        )
    made = make_accelerator(mixed_precision, plan, arguments, **options)
    if plan.carrier == "accelerate":
        from .ddp import Strategy

        return Strategy(made, plan)
    if plan.carrier == "sharded":
        from . import fsdp

        return fsdp.ShardedStrategy(made, plan)
    from . import pipeline

    return pipeline.PipelineStrategy(made, plan, arguments)


def make_accelerator(mixed_precision: str, plan: ParallelismPlan, arguments: Arguments, **options: Any) -> Accelerator:
    """Return Accelerate's frame; raises Unsupported for what this machine has not, or when the world is another one."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, InitProcessGroupKwargs

    handlers: list[Any] = []
    if not torch.cuda.is_available():
        # Without it every rank would train alone.
        if os.environ.setdefault("ACCELERATE_USE_CPU", "true").lower() not in ("1", "true", "yes", "on"):
            raise Unsupported("the job has no GPU, but ACCELERATE_USE_CPU is off: remove it from the job's env")
        if mixed_precision == "fp16":
            raise Unsupported("--fp16 needs a GPU; on CPU use --bf16")
        if arguments.gradient_compression == "bf16":
            raise Unsupported("--gradient_compression bf16 needs NCCL and a GPU; on CPU use fp16")
        # transformers imports DeepSpeed where it is installed, which would warn in the log that there is no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if plan.carrier == "deepspeed":
            _deepspeed_on_cpu()
            handlers.append(InitProcessGroupKwargs(backend="gloo"))  # else Accelerate sees one process only
    elif mixed_precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise Unsupported("this GPU has no bfloat16; use --fp16")
    if plan.world == 1 and plan.carrier == "accelerate":
        # Accelerate would make a group of one, and wrap the model for nothing
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    # A language model has no buffers that training changes; sending them before every forward pass would be for nothing.
    hook = DDPCommunicationHookType(arguments.gradient_compression)
    handlers.append(
        DistributedDataParallelKwargs(
            broadcast_buffers=arguments.own_loss, gradient_as_bucket_view=True, comm_hook=hook
        )
    )
    made = Accelerator(
        mixed_precision=mixed_precision, step_scheduler_with_optimizer=False, kwargs_handlers=handlers, **options
    )
    check_world(made.num_processes, plan.world)
    return made


def _deepspeed_on_cpu() -> None:
    """Let Accelerate and DeepSpeed work together where there is no GPU, which neither expects.

    DeepSpeed would compile a kernel for shared memory when it begins, which takes minutes and a compiler; gloo does what
    the kernel would do.
    """
    os.environ["ACCELERATE_USE_CPU"] = "false"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_world(real: int, promised: int) -> None:
    """Raise Unsupported unless as many processes work together as were started."""
    import torch.distributed as dist

    if real != promised or (dist.is_initialized() and dist.get_world_size() != promised):
        raise Unsupported(f"the job has {promised} processes, but torch.distributed connects {real}")
