import torch


class Config:
    layers = 2


torch.save({"config": Config(), "step": 3}, "last.ckpt")
torch.load("last.ckpt")
