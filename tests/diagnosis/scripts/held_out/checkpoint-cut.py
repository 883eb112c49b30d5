import torch

torch.save(torch.zeros(10_000), "model.pt")
with open("model.pt", "r+b") as file:
    file.truncate(20_000)
torch.load("model.pt")
