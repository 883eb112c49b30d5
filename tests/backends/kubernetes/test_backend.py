"""The backend kubernetes: the contract suite over a simulated cluster, two pods, a real collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloudtrain.testing.contract import BackendContract
from tests.backends.kubernetes.clusters import Ground, ground


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(tmp_path_factory.mktemp("kubernetes")) as made:
        yield made


class TestKubernetes(BackendContract):
    @pytest.fixture
    def connect(self, shared: Ground, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", shared.store.url)
        self.shared = shared
        return shared.backend

    def job_changes(self) -> dict:
        return {"output": "gs://local/out"}

    def calls(self) -> int:
        return len(self.shared.cluster.server.requests)

    def leftovers(self, handle: str) -> list[str]:
        return self.shared.left(handle)
