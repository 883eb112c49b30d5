"""A rank whose last statement is a collective ends with 0: gloo's threads are waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parents[2] / "entrypoints" / "path" / "sitecustomize.py"
PAIRS = 10
# The main thread keeps Python's lock from its last collective until Python ends: gloo's threads then wait for it.
SCRIPT = """
import os, socket, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)

def start_pairs():
    codes = []
    for _ in range({pairs}):
        held = socket.socket()  # until rank 0 listens on its port, nobody else is given it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        pids = []
        for rank in (0, 1):
            pid = os.fork()
            if not pid:
                return rank, port
            pids.append(pid)
        codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        held.close()
    print(codes)
    return None, None

rank, port = start_pairs()
if rank is not None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    kept = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    sys.setswitchinterval(5)
    for _ in range(20):
        dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1))
"""


@pytest.mark.train
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are found in /proc")
def test_a_collective_as_the_last_statement(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_bytes(START.read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(pairs=PAIRS)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, f"{[0] * (2 * PAIRS)}\n"), done.stderr
