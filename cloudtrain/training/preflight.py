"""What is checked of a training before anything is sent: model, data and functions, and how they go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.training import checks
from cloudtrain.training.shipping import sizes_of


def check(
    model: Any,
    data: Any,
    eval_data: Any,
    functions: Mapping[str, Any],
    nodes: int,
    use_gpus: bool | str,
    batch_size: int,
    options: Mapping[str, Any],
) -> str:
    """Raise BadRequest for what would fail on the nodes, as far as this machine can know.

    Returns:
        Why no batch was tried on this machine, or the empty text.
    """
    checks.check_model(model)
    checks.check_functions(**functions)
    own_collate, parallelism = functions["collate"] is not None, options.get("parallelism")
    held_out = []
    if eval_data is not None and not isinstance(eval_data, str):
        held_out = checks.read_held_out(eval_data, own_collate)
    if options.get("fp16") and not use_gpus:
        raise BadRequest("fp16 needs a GPU", "pass use_gpus=True, or bf16=True instead")
    if options.get("gradient_compression") == "bf16" and not use_gpus:
        raise BadRequest("gradient_compression='bf16' needs a GPU", "pass use_gpus=True, or 'fp16' instead")
    if options.get("dataloader_drop_last") and hasattr(data, "__len__") and not isinstance(data, str):
        accumulation = options.get("gradient_accumulation_steps", 1)
        if len(data) < (batch := batch_size * accumulation * nodes):
            raise BadRequest(
                f"{len(data):,} samples are fewer than one batch of {batch:,}, and dataloader_drop_last drops it",
                "remove dataloader_drop_last, or reduce batch_size",
            )
    own_loss = not sizes_of(model, functions["loss"])
    if not own_loss:
        checks.check_layout(model, parallelism, batch_size)
    if isinstance(data, str):
        return ""
    samples = checks.read_samples(data, own_collate=own_collate)
    strategy = parallelism.get("strategy", "ddp") if isinstance(parallelism, Mapping) else parallelism or "ddp"
    ddp = strategy == "ddp" and (nodes != 1 or options.get("processes_per_node", 1) != 1)
    return checks.try_batch(model, samples, functions, own_loss, batch_size, bool(use_gpus), ddp, held_out)
