import torch

embeddings = torch.empty(10**15)
print(embeddings.shape)
