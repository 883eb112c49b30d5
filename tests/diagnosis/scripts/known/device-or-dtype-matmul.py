import torch

model = torch.nn.Linear(8, 8).to(torch.bfloat16)
print(model(torch.randn(2, 8)))
