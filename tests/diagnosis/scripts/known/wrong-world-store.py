import os
from datetime import timedelta

import torch.distributed as dist

# The job was meant for three processes and started with two. Rank 0, which counts them, gives up first.
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", world_size=3, rank=rank, timeout=timedelta(minutes=5 * rank, seconds=3))
