"""What submitit's README shows, on a real Slurm: a call, its exception, several tasks, an array, and asyncio.

https://github.com/facebookincubator/submitit, README.md and docs/examples.md (1.5.4)
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.errors import RunFailed
from cloudtrain.events import State
from tests.backends.slurm.test_evaluation import configure
from tests.conftest import WAIT_S, wait_for
from tests.lab.slurm import Slurm

EXAMPLES = Path(__file__).parents[2] / "examples" / "function"
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
    group = on_cluster.starmap([(1, 2), (3, 4), (5, 6)], max_parallel=2)
    assert group.results() == [3, 7, 11]
    jobs = [(slurm.shared / "runs" / str(trial.run_id) / "a1" / "job").read_text() for trial in group.trials]
    number = jobs[0].partition("_")[0]
    assert jobs == [f"{number}_{task}" for task in range(3)], "the tasks of one array"

    async def both() -> list[int]:
        return list(await asyncio.gather(on_cluster.submit(1, 1), on_cluster.submit(2, 2)))

    assert asyncio.run(both()) == [2, 4]


def test_calls_of_an_array_are_cancelled_one_by_one(
    slurm: Slurm, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(slurm, tmp_path, monkeypatch)
    gate = str(slurm.shared / "gate")

    def square(x):
        import os
        import time

        while not os.path.exists(gate):
            time.sleep(0.1)
        return x * x

    group = cloudtrain.function(square, target="cluster").map([1, 2, 3, 4], max_parallel=3)
    wait_for(lambda: sum(trial.state is State.RUNNING for trial in group.trials) == 3, "three calls at once")
    running, waiting = group.run(group.trials[0]), group.run(group.trials[3])
    waiting.cancel()  # the last task has the number of the whole array too
    running.cancel()
    assert [run.wait(WAIT_S).state for run in (running, waiting)] == [State.CANCELLED] * 2
    Path(gate).touch()
    values = group.results(return_exceptions=True)
    assert values[1:3] == [4, 9] and all(isinstance(values[at], RunFailed) for at in (0, 3))


MANY = """
import os, signal, subprocess, sys, time
import cloudtrain

@cloudtrain.function(target="cluster")
def square(x):
    time.sleep(1)
    return x * x

group = square.map(range(8), max_parallel=4)
while not any(trial.run_id for trial in group.trials):
    time.sleep(0.1)
listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
for line in listed.splitlines():
    if os.environ["CLOUDTRAIN_HOME"] in line:
        os.kill(int(line.split()[0]), signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_group_whose_processes_were_killed_is_one_array_and_has_all_values(
    slurm: Slurm, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(slurm, tmp_path, monkeypatch)
    script = tmp_path / "many.py"
    script.write_text(MANY)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    group = cloudtrain.Sweep.find()
    assert group.results() == [x * x for x in range(8)]
    jobs = [(slurm.shared / "runs" / str(trial.run_id) / "a1" / "job").read_text() for trial in group.trials]
    assert len(jobs) == 8 and len({job.partition("_")[0] for job in jobs}) == 1, "one array"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("add", ["value: 2.5", "error: ZeroDivisionError('division by zero')"]),
        ("resume", ["first attempt: out of luck", "second attempt: steps 4 to 6"]),
        ("train", ["'rank': 1, 'weight': 2.998}", "best: 0.3"]),
    ],
)
def test_an_example_runs_here_as_on_this_machine(
    name: str, shown: list[str], slurm: Slurm, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(slurm, tmp_path, monkeypatch)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "cluster"], cwd=tmp_path, capture_output=True, text=True
    )
    assert all(text in done.stdout for text in shown), done.stdout + done.stderr
