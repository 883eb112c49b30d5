import torch

embedding = torch.nn.Embedding(100, 8)
print(embedding(torch.tensor([[5, 99, 100]])))
