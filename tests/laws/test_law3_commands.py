"""Law 3, submissions: drawn sequences of lost answers by the real command line, a fresh process for each command.

The platforms are the simulators, a real Slurm and real machines over SSH. An outage lasts while the user repeats commands,
and the watcher that the first submit started takes part in the whole sequence. Every other sequence, from the first on,
begins with a job that was made and about which nothing is answered.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from cloudtrain.simulators.sagemaker import server
from tests.backends.kubernetes.clusters import ground
from tests.conftest import WAIT_S, processes_of, wait_for
from tests.history.test_labelled import toml
from tests.lab.network import Lab
from tests.lab.slurm import Slurm
from tests.laws.clusters import Cluster, Hosts, Kubernetes
from tests.laws.outcomes import Platform
from tests.laws.test_law3_outcomes import Sagemaker, Vertex
from tests.seed import first_seed

EACH, LONG = 1, 10  # sequences on each platform
PROGRAM = [sys.executable, "-m", "cloudtrain.cli"]


class User:
    """Somebody who submits one job again and again from a shell, and what they were told."""

    def __init__(self, platform: Any, folder: Path, seed: int, away: bool) -> None:
        self.away = away  # the first job is made, and nothing about it is answered
        self.platform, self.folder, self.choose = platform, folder, random.Random(seed)
        folder.mkdir(parents=True)
        (folder / "train.py").write_text("import time\ntime.sleep(600)\n")
        (folder / "job.yaml").write_text("entrypoint: train.py\nenvironment: {requirements: none}\n")
        options = [f"{name} = {toml(value)}" for name, value in platform.options.items()]
        target = ["[targets.prod]", f'backend = "{platform.backend}"', *options]
        (folder / "cloudtrain.toml").write_text("\n".join(target))
        self.home = folder / "home"
        self.before = len(platform.jobs())
        self.wanted = 0  # jobs that the user has asked for
        self.over = True  # the next submit asks for another one
        self.done: Counter[str] = Counter()
        self.log: list[Any] = [seed]

    def go(self) -> Counter[str]:
        away = self.away and not isinstance(self.platform, Kubernetes)
        self._outage((lambda _: self.platform.away()) if away else self.platform.lose)
        code = self._do("submit")
        assert code == 5 or not away, self.log
        for _ in range(self.choose.randint(1, 2)):
            self._outage(self.platform.fail)
            self._do(self.choose.choice(["submit", "submit", "show", "new", "cancel"]))
        self.platform.heal()
        # The watcher may still be in the middle of a call that it began during the outage.
        wait_for(lambda: self.over or self._do("submit") == 0, f"an answer: {self.log}")
        for run in self._runs():
            wait_for(lambda run=run: run.attempts[-1].handle or run.record.status.state.final, f"an answer: {self.log}")
            assert len(run.attempts) == 1 and (run.attempts[-1].handle or run.record.cancel_requested), self.log
        self._check()
        if self._runs():
            self._command("cancel", *(run.run_id for run in self._runs()))
        wait_for(lambda: not self.platform.live(), f"the end of {self.platform.live()}: {self.log}")
        wait_for(lambda: not processes_of(self.home), "the end of the watcher")
        self._check()
        return self.done

    def _outage(self, begin: Callable[[random.Random], None]) -> None:
        """Let a drawn call fail, once or until the platform is well again."""
        self.platform.heal()
        begin(self.choose)
        if self.choose.random() < 0.7:
            if isinstance(self.platform, Cluster | Hosts):
                self.platform.persist()
            else:
                for fault in getattr(self.platform, "simulator", getattr(self.platform, "cluster", None)).faults:
                    fault.times = 10**6

    def _do(self, action: str) -> int:
        self.done[action] += 1
        runs = [run.run_id for run in self._runs()]
        if action == "cancel":
            self.over = True
            code = self._command("cancel", runs[0]) if runs else 0
        elif action == "show":
            code = self._command("show") if runs else 0
        else:
            if self.over or action == "new":
                self.wanted += 1
            code = self._command("submit", "job.yaml", "-t", "prod", *["--new"] * (action == "new"))
            self.over = code == 0
        assert code in (0, 5), self.log
        self._check()
        return code

    def _command(self, *words: str) -> int:
        own = getattr(self.platform, "environ", {})
        env = {**os.environ, **server.KEYS, **own, "CLOUDTRAIN_HOME": str(self.home)}
        done = subprocess.run(
            [*PROGRAM, *words], cwd=self.folder, env=env, capture_output=True, text=True, timeout=WAIT_S
        )
        self.log.append((words, done.returncode, done.stderr[-500:]))
        return done.returncode

    def _check(self) -> None:
        made = self.platform.jobs()
        assert len(made) == len(set(made)), f"an attempt has two jobs, {made}: {self.log}"
        assert len(made) - self.before <= self.wanted, f"{made} for {self.wanted} submissions: {self.log}"
        if isinstance(self.platform, Vertex):  # elsewhere a name is taken once, whoever sends it again
            self.platform.check_asked()

    def _runs(self) -> list[Run]:
        store = Store(self.home)
        return [Run(record.run_id, store, watch=False) for record in store.runs()]


@pytest.fixture
def platforms(tmp_path: Path) -> Iterator[dict[str, Platform]]:
    """The simulators; their jobs never end by themselves."""
    with ground(tmp_path / "kubernetes") as place:
        made = {
            "sagemaker": Sagemaker(tmp_path / "sagemaker"),
            "vertex": Vertex(tmp_path / "vertex", "rest"),
            "kubernetes": Kubernetes(place),
        }
        yield made
        made["sagemaker"].close()
        made["vertex"].close()


@pytest.fixture
def slurm_platform(slurm: Slurm, tmp_path: Path) -> Iterator[dict[str, Platform]]:
    """A real Slurm whose jobs wait."""
    yield {"slurm": Cluster(slurm, tmp_path / "shims", runs=False)}
    slurm.ask("scontrol", "update", "PartitionName=main", "State=UP")


@pytest.fixture
def ssh_platform(lab: Lab) -> dict[str, Platform]:
    """Two real machines."""
    return {"ssh": Hosts(lab, 2)}


def sequences(platforms: dict[str, Platform], folder: Path, count: int, figure: Callable[[str, object], None]) -> None:
    """Drive the platforms at the same time: most of it is waiting."""
    first = first_seed()

    def drive(name: str) -> Counter[str]:
        users = (User(platforms[name], folder / f"{name}-{n}", first + n, n % 2 == 0) for n in range(count))
        return sum((user.go() for user in users), Counter())

    with ThreadPoolExecutor(len(platforms)) as pool:
        done = sum(pool.map(drive, platforms), Counter())
    figure("sequences of lost answers by the command line, one job for each submission", count * len(platforms))
    figure("commands in them, each a process", done.total())


@pytest.mark.timeout(600)
def test_the_command_line_loses_answers(platforms, tmp_path, figure):
    sequences(platforms, tmp_path, EACH, figure)


@pytest.mark.timeout(600)
def test_slurm_loses_answers_to_the_command_line(slurm_platform, tmp_path, figure):
    sequences(slurm_platform, tmp_path, EACH, figure)


@pytest.mark.timeout(600)
def test_ssh_loses_answers_to_the_command_line(ssh_platform, tmp_path, figure):
    sequences(ssh_platform, tmp_path, EACH, figure)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_slurm_loses_answers_to_the_command_line_for_long(slurm_platform, tmp_path, figure):
    sequences(slurm_platform, tmp_path, LONG, figure)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ssh_loses_answers_to_the_command_line_for_long(ssh_platform, tmp_path, figure):
    sequences(ssh_platform, tmp_path, LONG, figure)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_command_line_loses_answers_for_long(platforms, tmp_path, figure):
    sequences(platforms, tmp_path, LONG, figure)
