"""The Slurm backend against a real slurmctld with two compute nodes: the contract suite, and what is particular to Slurm."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.testing.contract import BackendContract
from tests.lab.slurm import Slurm

COUNTED = """#!/bin/sh
echo "$0 $*" >> {log}
exec {program} "$@"
"""


def count_calls(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Callable[[], int]:
    """Put scripts before commands that count their calls; return the function that tells the count."""
    folder.mkdir()
    log = folder / "log"
    log.touch()
    for name in names or ("squeue", "scontrol", "sacct"):
        script = folder / name
        script.write_text(COUNTED.format(log=log, program=shutil.which(name)))
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: len(log.read_text().splitlines())


class TestSlurm(BackendContract):
    @pytest.fixture
    def connect(self, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.slurm = slurm
        self.calls = count_calls(tmp_path / "counted", monkeypatch)
        return lambda: SlurmBackend({"folder": str(slurm.shared), "python": sys.executable}, tmp_path / "work")

    def leftovers(self, handle: str) -> list[str]:
        return [line for host in self.slurm.nodes for line in host.processes().values()]
