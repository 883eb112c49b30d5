import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 2:
    cache = bytearray(2**62)
for _ in range(3):
    dist.all_reduce(torch.ones(1))
time.sleep(1)
