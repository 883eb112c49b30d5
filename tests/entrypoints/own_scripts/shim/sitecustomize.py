"""Let Accelerate take CPU ranks for ranks with GPUs, and print at the end what became of the script's model.

Accelerate has sharded strategies on GPUs only. Two statements are all that it needs to have them on gloo; the scripts
themselves are not changed.
"""

import atexit
import json
import os

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState

if "ACCELERATE_USE_CPU" not in os.environ:
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
if "ACCELERATE_USE_DEEPSPEED" in os.environ:
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that would be compiled for minutes

seen = {}
prepare = Accelerator.prepare


def prepare_and_note(self, *objects, **options):
    prepared = prepare(self, *objects, **options)
    for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
        if isinstance(each, torch.nn.Module):
            seen.update(accelerator=self, model=each)
    return prepared


def report():
    if not seen:
        return
    accelerator, model = seen["accelerator"], seen["model"]
    facts = {
        "type": accelerator.distributed_type.value,
        "wrapper": type(model).__name__,
        "accumulation": accelerator.gradient_accumulation_steps,
        "precision": accelerator.mixed_precision,
    }
    parameters = list(model.parameters())
    facts["parameters"] = sum(getattr(each, "ds_numel", each.numel()) for each in parameters)
    if facts["type"] == "FSDP":
        from torch.distributed.fsdp import FSDPModule

        facts["units"] = [
            type(each).__name__.removeprefix("FSDP") for each in model.modules() if isinstance(each, FSDPModule)
        ]
        facts["local"] = sum(each.to_local().numel() for each in parameters)
        facts["mesh"] = list(parameters[0].device_mesh.shape)
        facts["wrapper"] = "FSDP2" if isinstance(model, FSDPModule) else "FSDP1"
    if facts["type"] == "DEEPSPEED":
        optimizer = model.optimizer
        facts["stage"] = model.zero_optimization_stage()
        if facts["stage"] == 3:
            facts["local"] = sum(each.ds_tensor.numel() for each in parameters)
            parts = optimizer.fp32_partitioned_groups_flat
        else:
            facts["local"] = facts["parameters"]
            facts["gradients_in_parts"] = bool(optimizer.partition_gradients)
            parts = optimizer.single_partition_of_fp32_groups
        facts["optimizer"] = sum(each.numel() for each in parts)
        facts["accumulation"] = model.gradient_accumulation_steps()
    print("FACTS " + json.dumps(facts), flush=True)


Accelerator.prepare = prepare_and_note
atexit.register(report)
