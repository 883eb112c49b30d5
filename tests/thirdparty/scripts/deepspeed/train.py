"""Train with DeepSpeed's engine and its own checkpoints, in the shape of DeepSpeedExamples' cifar script."""

import argparse

import deepspeed
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def add_argument():
    parser = argparse.ArgumentParser(description="toy")
    parser.add_argument("-e", "--epochs", default=30, type=int, help="number of total epochs")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser.add_argument("--save_dir", default="saved", type=str)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main(args):
    deepspeed.init_distributed()
    torch.manual_seed(1)
    inputs = torch.rand(2048, 32)
    trainset = TensorDataset(inputs, (inputs.sum(1) > 16).long())
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sampler = DistributedSampler(trainset, num_replicas=world_size, rank=rank)
    loader = DataLoader(trainset, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    path, client_state = engine.load_checkpoint(args.save_dir)
    start = client_state["epoch"] if path else 0
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for data, target in loader:
            loss = nn.functional.cross_entropy(engine(data.to(engine.device)), target.to(engine.device))
            engine.backward(loss)
            engine.step()
        if rank == 0:
            print(f"[ {epoch + 1} ] loss: {loss.item():.6f}", flush=True)
        engine.save_checkpoint(args.save_dir, client_state={"epoch": epoch + 1})
    print(f"rank {rank} of {world_size} done", flush=True)
    if rank == 0:
        print(f"parameter norm {sum(p.double().pow(2).sum() for p in engine.module.parameters()).sqrt():.8f}")
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(add_argument())
