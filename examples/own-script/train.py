"""A script that knows nothing of cloudtrain: plain torch, two processes, gradients averaged by DistributedDataParallel."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights and the same task on every rank
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    target = torch.randn(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)

    torch.manual_seed(1 + rank)  # other samples on every rank
    for step in range(1, args.steps + 1):
        inputs = torch.randn(32, 16)
        noise = 0.1 * torch.randn(32, 1)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs @ target + noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 20 == 0 or args.verbose):
            print(f"step={step} loss={loss.item():.6f}")

    if rank == 0:
        folder = os.environ.get("CLOUDTRAIN_MODEL_DIR", "model")
        os.makedirs(folder, exist_ok=True)
        torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
        print(f"trained by {world} processes, saved in {folder}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
