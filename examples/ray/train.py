"""Fit a line with Ray Train's TorchTrainer: each worker has half of the data, and gradients are averaged."""

import argparse
import tempfile

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
arguments = parser.parse_args()


def train(config):
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 256).unsqueeze(1)[rank::size]
    y = 3 * x + 1
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(1, config["epochs"] + 1):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch={epoch} loss={loss.item():.6f}", flush=True)


ray.init()
print(f"Ray has {sum(node['Alive'] for node in ray.nodes())} nodes", flush=True)
TorchTrainer(
    train,
    train_loop_config={"epochs": arguments.epochs},
    scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),  # one on each node
    run_config=RunConfig(storage_path=tempfile.mkdtemp()),  # checkpoints would need a place that all nodes see
).fit()
