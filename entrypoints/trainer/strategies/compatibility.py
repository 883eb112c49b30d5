"""Check arguments (attention, LoRA, torch.compile) against the device and the parallelism."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import Unsupported

if TYPE_CHECKING:
    import torch

    from ..arguments import Arguments
    from .mesh import ParallelismPlan


def check_arguments(arguments: Arguments, plan: ParallelismPlan, device: torch.device | None) -> None:
    """Raise Unsupported for what this device, or this layout, does not do. Without a device only the layout is checked."""
    attention = arguments.attn_implementation
    if device is not None and attention.startswith("flash"):
        if device.type != "cuda":
            raise Unsupported(f"--attn_implementation {attention} needs a GPU; on {device.type} use sdpa")
        if attention == "flash_attention_2" and find_spec("flash_attn") is None:
            raise Unsupported(f"--attn_implementation {attention} needs the package flash_attn; without it use sdpa")
    if arguments.use_peft and plan.tensor * plan.pipeline > 1:
        raise Unsupported(f"--use_peft cannot be combined with {plan.described}: use fsdp to shard the model")
    if arguments.dtype != "float32" and plan.carrier == "deepspeed" and not arguments.bf16:
        raise Unsupported(
            f"--dtype {arguments.dtype} with {plan.described} needs --bf16: DeepSpeed trains all weights in one data type"
        )
    if arguments.own_loss and plan.tensor * plan.pipeline * plan.context > 1:
        built_in = arguments.kind.whole_loss and not arguments.own_task
        raise Unsupported(
            f"{arguments.task if built_in else 'a model or a loss of your own'} "
            f"works with strategies none, ddp, fsdp, hsdp and zero1 to zero3, not with {plan.described}"
        )
    if plan.pipeline > 1 and not arguments.kind.staged:
        raise Unsupported(f"pp_size {plan.pipeline} is for causal language models, not for {arguments.task}")
    if arguments.gradient_compression != "no" and (plan.carrier != "accelerate" or plan.context > 1):
        raise Unsupported(f"--gradient_compression works with strategy ddp, not with {plan.described}")
    if getattr(arguments, "hook", False) and (plan.carrier != "accelerate" or arguments.gradient_compression != "no"):
        raise Unsupported(
            f"a communication hook works with strategy ddp and without --gradient_compression, not with {plan.described}"
        )
    if arguments.torch_compile and plan.carrier != "accelerate":
        raise Unsupported(f"--torch_compile works with strategies none and ddp, not with {plan.described}")
    if plan.context > 1:
        _check_context(arguments, plan)
    if arguments.torch_compile and device is not None:
        import torch

        backends = torch._dynamo.list_backends(exclude_tags=())
        if arguments.torch_compile_backend not in backends:
            raise Unsupported(
                f"--torch_compile_backend is one of {', '.join(backends)}, not {arguments.torch_compile_backend}"
            )


def _check_context(arguments: Arguments, plan: ParallelismPlan) -> None:
    which = f"cp_size {plan.context}"
    if not arguments.writes:
        raise Unsupported(f"{which} is for language models, not for {arguments.task}")
    if arguments.attn_implementation != "sdpa":
        raise Unsupported(f"{which} works with --attn_implementation sdpa, not with {arguments.attn_implementation}")
    if arguments.torch_compile:
        raise Unsupported(f"--torch_compile cannot be combined with {which}")
