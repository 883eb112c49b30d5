import torch

head = torch.nn.Linear(1024, 10)
print(head(torch.randn(16, 768)))
