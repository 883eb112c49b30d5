"""The oracle and real trainings, made anew: torch's account of a few cases, and what a real step allocates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.forecast import memory
from cloudtrain.forecast.training import MEASURED
from tests.conftest import WAIT_S
from tests.entrypoints.training import ENTRYPOINTS
from tests.forecast import cases
from tests.forecast.cases import COUNTED, TORCH

REST = ("one process, no", "one process, checkpointing", "fsdp", "ddp")
LIVE = ("tiny 4x512, bf16", "tiny 4x512, no, checkpointing", "small 1x256, fsdp 8", "mistral 4x1024")
pytestmark = pytest.mark.train


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """End the oracle's fake group: later tests of this process would make theirs from its store."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", [*LIVE, *(pytest.param(name, marks=pytest.mark.long) for name in cases.CASES if name not in LIVE)]
)
def test_the_oracle_still_counts_the_same(name: str):
    import torch

    from tests.forecast import oracle

    same = {torch.__version__} == TORCH
    assert oracle.fake_peak(cases.CASES[name]) == pytest.approx(COUNTED[name], rel=1e-6 if same else 0.03)


def test_a_chunk_of_the_loss_is_as_large_as_the_trainer_makes_it():
    from trainer import chunked_loss

    assert ENTRYPOINTS and memory.CHUNK == chunked_loss.LOGITS and set(MEASURED) <= chunked_loss.FAMILIES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["one process", *(pytest.param(name, marks=pytest.mark.long) for name in REST)])
def test_real_allocations_are_within_5_percent(tmp_path: Path, name: str):
    from tests.forecast import real

    case = real.CASES[name]
    ranks = max(case.shards, case.ddp)
    command = [sys.executable, "-m", "tests.forecast.real", name, str(tmp_path / "meet")]
    folder = Path(__file__).parents[2]
    started = [
        subprocess.Popen(
            command, cwd=folder, env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=2 * WAIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for text in said:
        found = re.search(r"PEAK (\d+)", text)
        assert found, text
        assert memory.estimate(case.shape, case.step).total == pytest.approx(int(found[1]), rel=0.05)
