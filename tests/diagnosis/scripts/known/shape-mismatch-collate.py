import torch

rows = [torch.zeros(3), torch.zeros(5)]
for batch in torch.utils.data.DataLoader(rows, batch_size=2, num_workers=1):
    print(batch)
