import torch

rows = [row for row in range(100) if row > 200]
print(f"{len(rows)} rows after filtering")
torch.utils.data.DataLoader(rows, shuffle=True)
