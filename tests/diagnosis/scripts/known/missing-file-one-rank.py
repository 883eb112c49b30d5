import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    with open("shard-0.bin", "wb") as file:
        file.write(b"0" * 8)
dist.barrier()
if rank == 1:
    with open("shard-1.bin", "rb") as file:
        print(len(file.read()))
dist.all_reduce(torch.ones(1))
time.sleep(1)
