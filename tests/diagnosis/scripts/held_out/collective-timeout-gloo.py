import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    time.sleep(20)
dist.all_reduce(torch.ones(1))
