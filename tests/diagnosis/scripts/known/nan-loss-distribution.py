import torch

logits = torch.tensor([[float("nan"), 1.0]])
torch.distributions.Categorical(logits=logits)
