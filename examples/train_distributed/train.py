"""A model and data in memory, trained over three nodes: run me with python. The nodes run as groups of processes on this machine;
`target="prod"` would be one of cloudtrain.toml, with real ones."""

import logging

import torch
from torch.utils.data import Dataset

from cloudtrain import DistributedTraining


class Spirals(Dataset):
    """Points of two spirals that wind around each other; which one is to be learned."""

    def __init__(self, size: int = 6000) -> None:
        draw = torch.Generator().manual_seed(0)
        self.label = torch.randint(2, (size,), generator=draw)
        angle = 3 * torch.pi * torch.rand(size, generator=draw).sqrt()
        turned = angle + torch.pi * self.label
        noise = 0.2 * torch.randn(size, 2, generator=draw)
        self.point = torch.stack([turned.cos(), turned.sin()], dim=1) * angle[:, None] + noise

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.point[index], self.label[index]


class Training(DistributedTraining):
    """How gradients are synchronised is open to a subclass: here they travel as float16, half as many bytes."""

    def communication_hook(self):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        return fp16_compress_hook


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    )
    data = Spirals()
    training = Training(target="local")
    result = training.train_distributed(
        model,
        data,
        nodes=3,
        use_gpus=False,
        epochs=8,
        learning_rate=5e-3,
        logging_steps=100,
        env={"OMP_NUM_THREADS": "1"},
    )
    print({name: value for name, value in result.items() if name != "model"})

    with torch.no_grad():
        right = (result["model"](data.point).argmax(1) == data.label).float().mean()
    print(f"accuracy {right:.3f}")


if __name__ == "__main__":
    main()
