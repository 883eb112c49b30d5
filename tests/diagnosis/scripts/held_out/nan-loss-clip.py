import torch

weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.tensor([1.0, float("inf"), 0.0])
torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
