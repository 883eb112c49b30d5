"""Lets the threads of PyTorch end before Python does, for scripts of others that run on CPUs. Put its folder on PYTHONPATH.

With Gloo, a thread may still free a tensor while Python finalizes; on CPython before 3.14 this ends the process with SIGABRT
and "terminate called without an active exception", with any launcher
(https://github.com/pytorch/pytorch/issues/190489, 2026-11-24).
"""

import atexit
import sys
import time


@atexit.register
def wait_for_threads() -> None:
    if "torch.distributed" in sys.modules:
        time.sleep(1)
