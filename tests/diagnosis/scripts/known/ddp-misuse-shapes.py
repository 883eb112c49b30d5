import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
size = 4 + dist.get_rank()
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(size, size))
