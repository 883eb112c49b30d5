"""A simulated Akash network with an S3 store beside it, and what is needed to submit to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.akash.backend import AkashBackend
from cloudtrain.backends.api import Plan
from cloudtrain.job.job import Job
from cloudtrain.simulators import replicas
from cloudtrain.source.bundle import Bundle
from tests.backends.akash.schema import check_sdl
from tests.simulators.akash.market import Provider
from tests.simulators.akash.server import API_KEY, Behavior, Simulator
from tests.stores import S3

ENVIRON = {"AKASH_API_KEY": API_KEY, "AWS_ACCESS_KEY_ID": "AKIANODES0", "AWS_SECRET_ACCESS_KEY": "secret-of-nodes-0"}
CHEAP, SOLID = "akash1provider0000000000000000000000000cheap", "akash1provider0000000000000000000000000solid"


class Ground:
    """A network, a store, and backends over both."""

    def __init__(self, folder: Path, providers: list[Provider] | None = None, behavior: Behavior | None = None) -> None:
        self.folder, self.store = folder, S3()
        self.simulator = Simulator(folder / "akash", providers, behavior=behavior, check_sdl=check_sdl)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "store": "s3://bucket/ct",
            "store_endpoint": self.store.url,
            "image": "python:3.12",
            "max_usd_per_hour": 1.0,
            "console": self.simulator.url,
            "settle_s": 20.0,
        }

    def backend(self, **options: Any) -> AkashBackend:
        return AkashBackend({**self.options, **options}, self.folder / "runs")

    def plan(self, script: str, run_id: str = "run-x", attempt: int = 1, **job: Any) -> tuple[Plan, Bundle]:
        options = job.pop("akash", {})
        source = self.folder / f"source-{run_id}"
        source.mkdir(exist_ok=True)
        (source / "script.py").write_text(script)
        data = {"name": "x", "source": str(source), "entrypoint": "script.py", "environment": {"requirements": "none"}}
        bundle = Bundle.make(source, self.folder / "bundles")
        return self.backend(**options).plan(Job.from_dict({**data, **job}), bundle, run_id, attempt), bundle

    def posts(self) -> int:
        """Return how many deployments were asked for."""
        return self.simulator.server.count_requests("POST", "/v1/deployments")

    def left(self) -> list[str]:
        """Return the processes of containers that still run."""
        mine = [(pid, place) for pid, place in replicas.list_processes() if place.startswith(str(self.folder))]
        return [f"{pid} in {place}" for pid, place in mine]

    def close(self) -> None:
        self.simulator.close()
        self.store.close()


def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a person exports, and the pace of the log's upload."""
    for name, value in {**ENVIRON, "CLOUDTRAIN_SYNC_EVERY_S": "0.2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.001)


@contextmanager
def ground(folder: Path, providers: list[Provider] | None = None, behavior: Behavior | None = None) -> Iterator[Ground]:
    made = Ground(folder, providers, behavior)
    try:
        yield made
    finally:
        made.close()
    assert made.left() == []
