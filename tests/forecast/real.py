"""One real training on this machine's CPU, and the most bytes that it had allocated at once: one process or ranks.

python -m tests.forecast.real NAME FILE     one rank; RANK and WORLD_SIZE say which, FILE is where the ranks meet
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.forecast import oracle
from tests.forecast.cases import TINY, Case

# Heads are not grouped: a CPU's attention would copy keys and values, which a GPU's does not.
CASES = {
    "one process": Case(TINY, batch=1, sequence=512),  # bfloat16 takes a CPU long; the rest has four rows
    "one process, no": Case(TINY, batch=4, sequence=512, precision="no"),
    "one process, checkpointing": Case(TINY, batch=4, sequence=512, checkpointing=True),
    "fsdp": Case(TINY, batch=4, sequence=512, shards=2),
    "ddp": Case(TINY, batch=4, sequence=512, ddp=2),
}


def peak(case: Case) -> int:
    """Return the most bytes that were allocated at once in the second step, by torch's profiler; collective."""
    world = max(case.shards, case.ddp)
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)) if case.shards > 1 else None
    torch.manual_seed(1)
    model, head, optimizer, batch = oracle.prepared(case, "sdpa", mesh)
    if case.ddp > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    oracle.step(case, model, head, optimizer, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        oracle.step(case, model, head, optimizer, batch)
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    states = [each for group in optimizer.state.values() for each in group.values()]
    there = [*model.parameters(), *states, *batch.values()]
    if case.ddp > 1:
        there += [each for each in model.parameters() if each.requires_grad]  # the buckets stay
    return most + sum(local(each).untyped_storage().nbytes() for each in {id(each): each for each in there}.values())


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    name, file = sys.argv[1:]
    case = CASES[name]
    world = max(case.shards, case.ddp)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(os.environ["RANK"]), world_size=world)
    print("PEAK", peak(case), flush=True)
    if world > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
