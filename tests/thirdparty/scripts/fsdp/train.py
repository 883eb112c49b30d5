"""Train a model that is sharded with FSDP2, in the shape of PyTorch's own example; sharded checkpoints."""

import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def newest(folder):
    steps = [int(found[1]) for name in os.listdir(folder) if (found := re.fullmatch(r"step_(\d+)", name))]
    whole = [step for step in steps if os.path.exists(os.path.join(folder, f"step_{step}", ".metadata"))]
    return max(whole, default=0)


def main(args):
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 1))
    for module in model:
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held = sum(p.to_local().numel() for p in model.parameters())
    print(f"rank {rank} of {world_size} holds {held} of {sum(p.numel() for p in model.parameters())}", flush=True)
    start = newest(args.checkpoint_dir)
    if start:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=os.path.join(args.checkpoint_dir, f"step_{start}"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        print(f"resumed from step {start}", flush=True)
    for step in range(start + 1, args.steps + 1):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.rand(16, 16, generator=draw)
        loss = nn.functional.mse_loss(model(inputs), inputs.norm(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"Step {step}, Loss: {loss.item():.6f}", flush=True)
        if step % args.save_every == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save(
                {"model": weights, "optim": state}, checkpoint_id=os.path.join(args.checkpoint_dir, f"step_{step}")
            )
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, os.path.join(args.out, "model.pt"))
        print(f"parameter norm {sum(p.double().pow(2).sum() for p in whole.values()).sqrt():.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
