"""The Slurm backend against a real slurmctld with two compute nodes: the contract suite, and what is particular to Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.testing.contract import BackendContract
from tests.lab.slurm import Slurm


class TestSlurm(BackendContract):
    @pytest.fixture
    def connect(self, slurm: Slurm, tmp_path: Path):
        self.slurm = slurm
        return lambda: SlurmBackend({"folder": str(slurm.shared), "python": sys.executable}, tmp_path / "work")

    def leftovers(self, handle: str) -> list[str]:
        return [line for host in self.slurm.nodes for line in host.processes().values()]
