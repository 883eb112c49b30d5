"""What test_weights.py lets ranks do: build a model that FSDP shards, drawn, read from files, and whole; rank 0 prints
what memory each start took, and whether the values are those of one process."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from trainer import lora, tensor_files
from trainer import model as models
from trainer.arguments import Arguments
from trainer.strategies import fsdp, mesh

SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "block_size": 16,
    "intermediate_size": 2048,
}


class Words:
    bos_token_id = eos_token_id = pad_token_id = 1

    def __len__(self) -> int:
        return 8000


class Peak(threading.Thread):
    """The most anonymous memory of this process while it runs, above that at its start, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first, self.most, self.over = anonymous(), 0, False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, anonymous() - self.first)
            time.sleep(0.002)

    def stop(self) -> int:
        self.most = max(self.most, anonymous() - self.first)
        self.over = True
        self.join()
        return self.most


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def write_model(folder: Path, model, dtype: torch.dtype) -> None:
    """Write a model that has no values yet, one tensor after the other."""
    weights, formats, wholes = model.initial_weights, {}, {}
    for name, parameter in model.named_parameters():
        formats[name] = tensor_files.TensorFormat(tuple(parameter.shape), dtype)
        wholes[name] = tuple(slice(0, size) for size in parameter.shape)
    like = dict(model.named_parameters())
    tensors = ((name, weights.part(name, like[name], wholes[name]).to(dtype)) for name in formats)
    tensor_files.write(folder, formats, tensors)
    model.config.save_pretrained(folder)


def start(model, plan) -> None:
    fsdp.shard(model, model, fsdp.mesh_of(plan, torch.device("cpu")), plan, "no")
    fsdp.materialize(model, torch.device("cpu"))


def main() -> None:
    dist.init_process_group("gloo")
    folder, plan = Path(sys.argv[1]), mesh.ParallelismPlan("fsdp", shard=dist.get_world_size())
    fsdp.mesh_of(plan, torch.device("cpu"))
    from transformers import AutoModelForCausalLM  # noqa: F401 - what is imported is not to be counted

    small = models.build(Arguments(hidden_size=32, num_hidden_layers=1, num_attention_heads=4), Words(), [])
    lora.adapted(small, Arguments(use_peft=True))
    drawn = Arguments(**SIZES)
    if dist.get_rank() == 0:
        whole = models.build(Arguments(**SIZES, seed=5), Words(), [])
        whole.to(torch.bfloat16).save_pretrained(folder)
        del whole
    dist.barrier()
    read = Arguments(**SIZES, model=str(folder))
    frozen = Arguments(**SIZES, model=str(folder), use_peft=True, lora_r=4, dtype="bfloat16")
    for case, arguments in (("drawn", drawn), ("read", read), ("frozen in bfloat16", frozen), ("whole", drawn)):
        peak = Peak()
        peak.start()
        model = (models.build if case == "whole" else models.outline)(arguments, Words(), [])
        start(model, plan)
        most = peak.stop()
        sizes = [each.numel() * each.element_size() for each in model.parameters()]
        held = sum(each.to_local().numel() * each.element_size() for each in model.parameters())
        assert all(isinstance(each, DTensor) for each in model.parameters())
        whole = models.build(arguments, Words(), []).state_dict() if dist.get_rank() == 0 else {}
        equal = True
        for name, tensor in model.state_dict().items():
            full = tensor.full_tensor()
            equal &= not whole or torch.equal(full, whole[name])
        mine = {"peak": most, "part": held, "tensor": max(sizes), "whole": sum(sizes)}
        ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if dist.get_rank() == 0:
            print("FOUND", json.dumps({"case": case, "ranks": ranks, "equal": equal}), flush=True)
        del model, whole
        dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # taking the group down may abort a process (pytorch issue 190489)
