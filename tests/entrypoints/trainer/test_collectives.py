"""What ranks have in common: the world, what is decided together, the versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS, WAIT_S, hold_port

from trainer import collectives, strategies  # isort: skip
from trainer.errors import Unsupported, check_versions  # isort: skip

assert ENTRYPOINTS


def test_the_world_is_looked_at():
    strategies.check_world(1, 1)
    with pytest.raises(Unsupported, match="the job has 2 processes, but torch.distributed connects 1"):
        strategies.check_world(1, 2)


def test_alone_everything_is_agreed_at_once():
    agreement = collectives.Agreement()
    assert agreement.settle(False, True) == (False, True) and agreement.settle(True, False) == (True, False)
    assert agreement.close() == (False, False)
    assert collectives.from_rank_0(lambda: 3) == 3 and collectives.every_rank("x") == ["x"]
    assert collectives.world_size() == 1 and collectives.leave(3) == 3
    collectives.check_same("thing", "a")


def test_old_and_absent_libraries_are_told(monkeypatch: pytest.MonkeyPatch):
    from trainer import errors

    check_versions("tp_size")
    monkeypatch.setitem(errors.NEEDED_BY_MODEL_PARALLELISM, "accelerate", "98.0")
    check_versions()
    with pytest.raises(Unsupported, match=r"tp_size needs accelerate 98\.0 or newer, here is "):
        check_versions("tp_size")
    monkeypatch.setitem(errors.NEEDED, "torch", "99.0.0")
    with pytest.raises(Unsupported, match=r"needs torch 99\.0\.0 or newer, here is "):
        check_versions()
    monkeypatch.setitem(errors.NEEDED, "torch", "2.0")
    monkeypatch.setitem(errors.NEEDED, "no-such-library", "1")
    with pytest.raises(Unsupported, match="no-such-library is not installed"):
        check_versions()


RANK = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from trainer import collectives
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 1:
    time.sleep(float(sys.argv[2]))
    open(sys.argv[3], "w").close()
collectives.REFUSAL_WAIT_S = float(sys.argv[4])
if rank == 0:
    wait = collectives.wait_for_refusals
    collectives.wait_for_refusals = lambda s: print("met", wait(s), os.path.exists(sys.argv[3]), flush=True)
collectives.leave(78)
"""


@pytest.mark.parametrize("other, wait_s, met", [(2, 120, "met True True"), (600, 1, "met False False")])
def test_a_refusal_waits_for_the_other_ranks_but_not_for_ever(tmp_path: Path, other: int, wait_s: int, met: str):
    """A rank that left at once would cut the connections of one that still makes its groups."""
    port, ranks = hold_port(), []
    for rank in range(2):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
        }
        command = [sys.executable, "-c", RANK, str(ENTRYPOINTS), str(other), str(tmp_path / "came"), str(wait_s)]
        ranks.append(subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True))
    try:
        assert ranks[0].communicate(timeout=WAIT_S)[0].strip() == met
        assert ranks[0].returncode == 78
        assert other > 10 or ranks[1].wait(WAIT_S) == 78
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        port.close()
