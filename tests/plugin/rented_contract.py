"""The contract suite for the rented machines. tests/test_plugin.py installs the package and runs this file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cloudtrain_rented import RentedBackend
from rented_service import KEY, Service

from cloudtrain.testing.contract import BackendContract

pytestmark = pytest.mark.slow  # it starts processes


class TestRented(BackendContract):
    @pytest.fixture(autouse=True)
    def service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
        monkeypatch.setenv("RENTED_API_KEY", KEY)
        self.rented = Service(tmp_path / "service")
        yield self.rented
        self.rented.close()

    @pytest.fixture
    def connect(self, service: Service, tmp_path: Path):
        options = {"address": service.url, "volume": str(service.volume), "python": sys.executable}
        return lambda: RentedBackend(options, tmp_path)

    def calls(self) -> int:
        return self.rented.calls
