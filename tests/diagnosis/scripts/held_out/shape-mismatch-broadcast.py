import torch

positions = torch.zeros(1, 512, 64)
print((torch.randn(2, 600, 64) + positions).shape)
