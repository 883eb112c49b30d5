"""The oracle of the fit forecast: the shared trainer's step on fake tensors, which take no memory and are counted.

    python -m tests.forecast.oracle > tests/forecast/oracle.csv

It is one rank of an FSDP world of any size, or one process. Attention is CUDA's flash kernel as far as its shapes go:
on a CPU torch would keep copies that a GPU does not keep.
"""

from __future__ import annotations

import csv
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.entrypoints import training  # noqa: F401 - puts the trainer on the path
from tests.forecast.cases import CASES, Case

FLASH = "as_on_cuda"


def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: Any = None, **_: Any) -> tuple:
    """Attention as CUDA's kernels have it: in half precision flash, in float32 the memory-efficient one."""
    assert mask is None
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    causal = getattr(module, "is_causal", True)
    if query.dtype == torch.float32:
        out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scaling)
    return out[0].transpose(1, 2), None


def config_of(case: Case) -> Any:
    from transformers import AutoConfig

    sizes = {key: value for key, value in case.config.items() if key != "model_type"}
    return AutoConfig.for_model(case.config["model_type"], use_cache=False, **sizes)


def built(case: Case, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    kind = torch.bfloat16 if case.precision == "pure bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config_of(case), attn_implementation=attention, dtype=kind)
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def sharded(model: Any, case: Case, mesh: Any) -> None:
    from trainer.strategies import fsdp
    from trainer.strategies.mesh import ParallelismPlan

    plan = ParallelismPlan("fsdp", shard=case.shards)
    fsdp.shard(model, model, {"replicate": mesh, "shard": mesh} | {"replicate": One()}, plan, case.precision)


class One:
    """A mesh axis of one rank."""

    def size(self) -> int:
        return 1


def step(
    case: Case, model: Any, head: Any, optimizer: Any, batch: dict[str, torch.Tensor], tracker: Any = None
) -> None:
    """One optimiser step, as trainer/loop.py and trainer/strategies/ddp.py do it."""
    from accelerate.utils import convert_outputs_to_fp32
    from trainer import model as models

    kind = batch["labels"].device.type
    mixed = torch.autocast(kind, torch.bfloat16) if case.precision == "bf16" else nullcontext()

    def forward(**inputs: Any) -> Any:
        with mixed:
            return model(**inputs)

    called = convert_outputs_to_fp32(forward) if case.precision == "bf16" else forward
    for _ in range(case.accumulation):
        if head is not None:
            losses = head.losses(called, batch, summed=True)
        else:
            losses = models.losses(called(**models.inputs(batch)).logits, batch["labels"])
        share = losses.sum() / batch["labels"].numel()
        share.backward()
        del losses, share
        if tracker is not None:
            tracker.reset_mod_stats()
    nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def prepared(case: Case, attention: str, mesh: Any = None) -> tuple[Any, Any, Any, dict[str, torch.Tensor]]:
    from trainer import chunked_loss
    from trainer import model as models
    from trainer.arguments import Arguments

    model = built(case, attention)
    if case.lora:
        from trainer import lora

        arguments = Arguments(lora_r=case.lora, lora_dropout=0.0, lora_target_modules=["all-linear"])
        model = lora.adapted(model, arguments)
    head = chunked_loss.of(model) if case.chunked else None
    if mesh is not None:
        sharded(model, case, mesh)
    optimizer = models.optimizer(model, Arguments())
    ids = torch.randint(0, case.config["vocab_size"], (case.batch, case.sequence))
    return model, head, optimizer, {"input_ids": ids, "labels": ids}


def fake_peak(case: Case, table: bool = False) -> Any:
    """Return the most bytes that live at once in the second step: the optimizer's state is there from then on."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLASH, flash)
    mesh = None
    if case.shards > 1:
        if not dist.is_initialized() or dist.get_world_size() != case.shards:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.shards)
        mesh = dist.init_device_mesh("cpu", (case.shards,), mesh_dim_names=("shard",))
    with FakeTensorMode():
        model, head, optimizer, batch = prepared(case, FLASH, mesh)
        if mesh is None:
            tracker: Any = MemTracker()
            tracker.track_external(model, optimizer, batch["labels"])
        else:
            step(case, model, head, optimizer, batch)  # what DTensor looks up once is not a step's
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((batch["labels"],))
        with tracker:
            for _ in range(2):
                step(case, model, head, optimizer, batch, tracker)
    snapshot = next(each for kind, each in tracker.get_tracker_snapshot("peak").items() if kind.type == "cpu")
    return snapshot if table else int(snapshot["Total"])


def main() -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["case", "bytes", "torch"])
    for name, case in CASES.items():
        writer.writerow([name, fake_peak(case), torch.__version__])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
