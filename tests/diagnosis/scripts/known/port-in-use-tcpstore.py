import socket

import torch.distributed as dist

taken = socket.create_server(("0.0.0.0", 0))
port = taken.getsockname()[1]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
