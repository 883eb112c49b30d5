import torch
import torch.distributed as dist


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(Two())
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
