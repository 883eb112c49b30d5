import torch

torch.autograd.set_detect_anomaly(True)
x = torch.zeros(1, requires_grad=True)
(torch.sqrt(x) * 0).sum().backward()
