"""The contract suite for the toy backend: one fixture. tests/test_plugin.py installs the package and runs this file."""

from __future__ import annotations

from pathlib import Path

import pytest
from cloudtrain_attic import AtticBackend

from cloudtrain.testing.contract import BackendContract

pytestmark = pytest.mark.slow  # it starts processes


class TestAttic(BackendContract):
    @pytest.fixture
    def connect(self, tmp_path: Path):
        return lambda: AtticBackend({"folder": str(tmp_path / "attic")}, tmp_path)
