import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(20)
dist.monitored_barrier(timeout=timedelta(seconds=2))
