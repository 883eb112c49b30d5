import torch

weights = {"embedding": torch.zeros(1_000_000), "head": torch.zeros(1_000_000)}
print("Saving model checkpoint to outputs/checkpoint-500")
torch.save(weights, "/dev/full")
