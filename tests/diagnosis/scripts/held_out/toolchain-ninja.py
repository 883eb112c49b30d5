import os

os.environ["PATH"] = "/nonexistent"
from torch.utils.cpp_extension import verify_ninja_availability

verify_ninja_availability()
