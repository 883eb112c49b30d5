"""The backend akash: the contract suite over a simulated network, two services, a real collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloudtrain.testing.contract import BackendContract
from tests.backends.akash.ground import Ground, environment, ground


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("akash")) as made:
        yield made


class TestAkash(BackendContract):
    @pytest.fixture
    def connect(self, shared: Ground, monkeypatch: pytest.MonkeyPatch):
        environment(monkeypatch)
        return shared.backend
