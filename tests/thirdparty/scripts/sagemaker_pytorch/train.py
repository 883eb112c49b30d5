"""Train a small network on SageMaker's contract, in the shape of the PyTorch scripts of its notebooks."""

import argparse
import json
import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)
logger.addHandler(logging.StreamHandler(sys.stdout))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def get_train_data_loader(batch_size, training_dir, is_distributed):
    logger.info("Get train data loader")
    held = torch.load(os.path.join(training_dir, "training.pt"))
    dataset = TensorDataset(held["inputs"], held["labels"])
    sampler = DistributedSampler(dataset) if is_distributed else None
    return DataLoader(dataset, batch_size=batch_size, shuffle=sampler is None, sampler=sampler)


def train(args):
    is_distributed = len(args.hosts) > 1 and args.backend is not None
    logger.debug("Distributed training - %s", is_distributed)
    rank, world_size = 0, 1
    if is_distributed:
        world_size = len(args.hosts)
        os.environ["WORLD_SIZE"] = str(world_size)
        rank = args.hosts.index(args.current_host)
        os.environ["RANK"] = str(rank)
        dist.init_process_group(backend=args.backend, rank=rank, world_size=world_size)
        logger.info(
            "Initialized the distributed environment: '%s' backend on %d nodes.", args.backend, dist.get_world_size()
        )
    torch.manual_seed(args.seed)
    train_loader = get_train_data_loader(args.batch_size, args.data_dir, is_distributed)
    model = Net()
    if is_distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader, 1):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if batch_idx % args.log_interval == 0:
                logger.info(
                    "Train Epoch: %d [%d/%d (%.0f%%)] Loss: %.6f",
                    epoch,
                    batch_idx * len(data),
                    len(train_loader.sampler),
                    100.0 * batch_idx / len(train_loader),
                    loss.item(),
                )
    print(f"rank {rank} of {world_size} done", flush=True)
    if rank == 0:
        save_model(model.module if is_distributed else model, args.model_dir)


def save_model(model, model_dir):
    logger.info("Saving the model.")
    path = os.path.join(model_dir, "model.pth")
    torch.save(model.cpu().state_dict(), path)
    norm = sum(p.double().pow(2).sum() for p in model.parameters()).sqrt()
    logger.info("Saved, parameter norm %.8f", norm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--epochs", type=int, default=10, metavar="N")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR")
    parser.add_argument("--momentum", type=float, default=0.5, metavar="M")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--log-interval", type=int, default=20, metavar="N")
    parser.add_argument("--backend", type=str, default=None)
    parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
    parser.add_argument("--current-host", type=str, default=os.environ["SM_CURRENT_HOST"])
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--data-dir", type=str, default=os.environ["SM_CHANNEL_TRAINING"])
    parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
    train(parser.parse_args())
