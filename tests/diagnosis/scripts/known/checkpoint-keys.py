import torch

torch.save(torch.nn.Linear(8, 8).state_dict(), "model.pt")
torch.nn.Linear(8, 16).load_state_dict(torch.load("model.pt"))
