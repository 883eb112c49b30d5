def steps(first, last):
    for step in range(first, last):
        print(f"{{'loss': {3.0 - step / 100:.4f}, 'learning_rate': 5e-05, 'epoch': {step / 100:.2f}}}")

import torch

steps(0, 30)
torch.nn.functional.cross_entropy(torch.randn(8, 4), torch.zeros(6, dtype=torch.long))
