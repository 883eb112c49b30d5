"""Simulators of Vertex AI: `bench` runs jobs, `paper` only keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.simulators import replicas
from cloudtrain.simulators.vertex.lifecycle import Behavior
from tests.backends.vertex.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.simulator.close()
    assert [place for _, place in replicas.list_processes() if place.startswith(str(tmp_path))] == []


@pytest.fixture
def paper(tmp_path: Path) -> Iterator[Bench]:
    """A service that takes jobs and never runs them."""
    made = Bench(tmp_path, Behavior(execute=False))
    yield made
    made.simulator.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)
