import os

os.environ |= {"CXX": "/nonexistent/g++", "TORCHINDUCTOR_CACHE_DIR": os.path.abspath("inductor")}
import torch


@torch.compile
def step(x):
    return torch.relu(x) * 2


print(step(torch.ones(8)))
