import torch

torch.save(torch.zeros(100_000), "model.pt")
with open("model.pt", "r+b") as file:
    file.truncate(200_000)
torch.load("model.pt")
