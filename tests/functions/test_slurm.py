"""What submitit's README shows, on a real Slurm: a call, its exception, several tasks, an array, and asyncio.

https://github.com/facebookincubator/submitit, README.md and docs/examples.md (1.5.4)
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.errors import RunFailed
from tests.backends.slurm.test_evaluation import configure
from tests.conftest import WAIT_S
from tests.lab.slurm import Slurm

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("census")]


def test_calls_of_functions(slurm: Slurm, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(slurm, tmp_path, monkeypatch)

    def add(a, b):
        return a + b

    def divide(a, b):
        return a / b

    def where():
        import os
        import socket

        return int(os.environ["RANK"]), socket.gethostname()

    on_cluster = cloudtrain.function(add, target="cluster")
    run = on_cluster.submit(5, 7)
    assert run.result(WAIT_S) == 12 and run.done()
    failure = cloudtrain.function(divide, target="cluster").submit(1, 0).exception(WAIT_S)
    assert isinstance(failure, RunFailed) and isinstance(failure.__cause__, ZeroDivisionError)
    ranks = cloudtrain.function(where, target="cluster", num_nodes=2).submit().results(WAIT_S)
    assert [rank for rank, _ in ranks] == [0, 1] and len({host for _, host in ranks}) == 2
    assert on_cluster.starmap([(1, 2), (3, 4), (5, 6)], max_parallel=2).results() == [3, 7, 11]

    async def both() -> list[int]:
        return list(await asyncio.gather(on_cluster.submit(1, 1), on_cluster.submit(2, 2)))

    assert asyncio.run(both()) == [2, 4]
