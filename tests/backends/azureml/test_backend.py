"""The contract on the simulated workspace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.azureml.backend import AzuremlBackend
from cloudtrain.simulators import replicas
from cloudtrain.simulators.azureml.server import Simulator
from cloudtrain.testing.contract import BackendContract


class TestAzureml(BackendContract):
    @pytest.fixture(autouse=True)
    def simulator(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
        self.workspace = Simulator(tmp_path / "simulator")
        for name, value in self.workspace.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CLOUDTRAIN_SYNC_EVERY_S", "1")
        yield self.workspace
        self.workspace.close()
        assert [place for _, place in replicas.list_processes() if place.startswith(str(tmp_path))] == []

    @pytest.fixture
    def connect(self, simulator: Simulator, tmp_path: Path):
        return lambda: AzuremlBackend(simulator.options, tmp_path / "work")

    def job_changes(self) -> dict:
        return {"image": "any:1"}

    def calls(self) -> int:
        return len(self.workspace.server.requests)

    def folders(self) -> list[Path]:
        return []
