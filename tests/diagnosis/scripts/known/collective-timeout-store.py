from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
store.set_timeout(timedelta(seconds=2))
if dist.get_rank() == 0:
    store.wait(["shards-ready"])
import time

time.sleep(20)
