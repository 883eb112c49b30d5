"""Which arguments (attention, LoRA, torch.compile) go with which device and which parallelism."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from ..errors import Refused

if TYPE_CHECKING:
    from ..arguments import Arguments
    from .mesh import Layout


def check_arguments(arguments: Arguments, plan: Layout, device: torch.device) -> None:
    """Raise Refused for what this device, or this layout, does not do."""
    attention = arguments.attn_implementation
    if attention.startswith("flash"):
        if device.type != "cuda":
            raise Refused(f"--attn_implementation {attention} needs a GPU; on {device.type} there is sdpa")
        if attention == "flash_attention_2" and find_spec("flash_attn") is None:
            raise Refused(f"--attn_implementation {attention} needs the package flash_attn; without it there is sdpa")
    if arguments.use_peft and plan.tensor * plan.pipeline > 1:
        raise Refused(
            f"--use_peft goes without tp_size and pp_size, not with {plan.described}: fsdp divides it as well"
        )
    if arguments.torch_compile and plan.carrier != "accelerate":
        raise Refused(f"--torch_compile goes with strategies none and ddp, not with {plan.described}")
    if plan.context > 1:
        _check_context(arguments, plan)
    if arguments.torch_compile:
        known = torch._dynamo.list_backends(exclude_tags=())
        if arguments.torch_compile_backend not in known:
            raise Refused(
                f"--torch_compile_backend is one of {', '.join(known)}, not {arguments.torch_compile_backend}"
            )


def _check_context(arguments: Arguments, plan: Layout) -> None:
    which = f"cp_size {plan.context}"
    if not arguments.writes:
        raise Refused(f"{which} is for language models, not for {arguments.task}")
    if arguments.attn_implementation != "sdpa":
        raise Refused(f"{which} goes with --attn_implementation sdpa, not with {arguments.attn_implementation}")
    if arguments.torch_compile:
        raise Refused(f"--torch_compile goes without {which}")
