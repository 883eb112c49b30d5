"""The ranks agree on a mean, on Slurm (SLURM_PROCID) and on every other target (RANK)."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
steps = parser.parse_args().steps

if "SLURM_PROCID" in os.environ:
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
    os.environ.setdefault("MASTER_ADDR", os.environ["SLURM_LAUNCH_NODE_IPADDR"])
    os.environ.setdefault("MASTER_PORT", "29500")
dist.init_process_group("gloo")
value = torch.tensor(float(dist.get_rank()))
for step in range(1, steps + 1):
    dist.all_reduce(value)
    value /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"step={step} mean={value.item():.2f}", flush=True)
dist.destroy_process_group()
