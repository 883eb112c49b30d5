"""Strategies that are carried and those that are refused, never replaced."""

from __future__ import annotations

import pytest
import torch

from tests.entrypoints.trainer import ENTRYPOINTS

import parallel  # isort: skip
from refused import Refused, check_versions  # isort: skip

assert ENTRYPOINTS


@pytest.mark.parametrize(
    "parallelism, world, name",
    [
        ({}, 1, "none"),
        ({}, 2, "ddp"),
        ({"strategy": "ddp"}, 1, "ddp"),
        ({"strategy": "none"}, 1, "none"),
        ({"strategy": "ddp", "tp_size": 1, "pp_size": 1, "cp_size": 1, "offload": False}, 2, "ddp"),
    ],
)
def test_what_is_carried(parallelism: dict, world: int, name: str):
    assert parallel.chosen(parallelism, world) == name


@pytest.mark.parametrize(
    "parallelism, world, sentence",
    [
        ({"strategy": "none"}, 2, "strategy none is for one process, the job has 2"),
        ({"strategy": "tensor"}, 2, "no strategy tensor; it has none, ddp"),
        ({"strategy": "ddp", "cp_size": 2}, 2, "no cp_size 2"),
        ({"strategy": "ddp", "offload": True}, 2, "nothing to offload"),
    ],
)
def test_what_is_refused(parallelism: dict, world: int, sentence: str):
    with pytest.raises(Refused, match=sentence):
        parallel.chosen(parallelism, world)


def test_the_world_and_the_wrapper_are_looked_at():
    parallel.check_world(1, 1)
    with pytest.raises(Refused, match="the job has 2 processes, but 1 work together here"):
        parallel.check_world(1, 2)
    bare = torch.nn.Linear(1, 1)
    assert parallel.check_wrapper(bare, "none", 1) == "none"
    with pytest.raises(Refused, match="strategy ddp should wrap the model in DistributedDataParallel, it is a Linear"):
        parallel.check_wrapper(bare, "ddp", 2)
    with pytest.raises(Refused, match="should wrap the model in None, it is a DataParallel"):
        parallel.check_wrapper(torch.nn.DataParallel(bare), "none", 1)


def test_alone_everything_is_agreed_at_once():
    agreement = parallel.Agreement()
    assert agreement.settle(False, True) == (False, True) and agreement.settle(True, False) == (True, False)
    assert agreement.close() == (False, False)
    assert parallel.from_rank_0(lambda: 3) == 3 and parallel.every_rank("x") == ["x"]
    assert parallel.world_size() == 1 and parallel.leave(3) == 3
    parallel.check_same("thing", "a")


def test_old_and_absent_libraries_are_told(monkeypatch: pytest.MonkeyPatch):
    import refused

    check_versions()
    monkeypatch.setitem(refused.NEEDED, "torch", "99.0.0")
    with pytest.raises(Refused, match=r"needs torch 99\.0\.0 or newer, here is "):
        check_versions()
    monkeypatch.setitem(refused.NEEDED, "torch", "2.0")
    monkeypatch.setitem(refused.NEEDED, "no-such-library", "1")
    with pytest.raises(Refused, match="no-such-library is not installed"):
        check_versions()
