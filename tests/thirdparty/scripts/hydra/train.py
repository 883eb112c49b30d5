"""Train a network that a Hydra configuration describes; results lie in Hydra's own run folder."""

import logging
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        log.info("Configuration:\n%s", OmegaConf.to_yaml(cfg))
    torch.manual_seed(cfg.seed)
    sizes = [8, *cfg.model.hidden, 1]
    layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())][:-1]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = instantiate(cfg.optimizer, params=model.parameters())
    inputs = torch.rand(8192, 8)
    targets = inputs.prod(1, keepdim=True) * 10
    for epoch in range(cfg.trainer.max_epochs):
        order = torch.randperm(len(inputs))[rank::world_size]
        for part in order.split(cfg.trainer.batch_size):
            loss = nn.functional.mse_loss(model(inputs[part]), targets[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        log.info("epoch=%d loss=%.6f", epoch, loss.item())
    log.info("rank %d of %d done", rank, world_size)
    if rank == 0:
        path = Path(HydraConfig.get().runtime.output_dir) / "model.pt"
        torch.save(model.module.state_dict(), path)
        norm = sum(p.detach().double().pow(2).sum() for p in model.parameters()).sqrt()
        log.info("parameter norm %.8f", norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
