import torch

old = torch.optim.Adam(torch.nn.Linear(4, 4).parameters())
new = torch.optim.Adam(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).parameters())
new.load_state_dict(old.state_dict())
