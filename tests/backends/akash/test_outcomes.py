"""Law 3 on Akash: one submission makes one deployment and one lease, whatever answers of the Console are lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.aws import Aws
from cloudtrain.simulators.http import Fault
from tests.backends.akash.ground import Ground, environment
from tests.laws.outcomes import drive, recorded
from tests.seed import first_seed
from tests.simulators.akash.server import Behavior

NORMAL, LONG = 5, 100  # sequences
CREATE = ("POST", "/v1/deployments$")
CALLS = (CREATE, ("GET", r"/v1/deployments\?"), ("GET", r"/v1/deployments/\d+"), ("DELETE", "/v1/deployments/"),
         ("GET", "/v1/bids"), ("GET", "/v1/providers"), ("POST", "/v1/leases"))  # fmt: skip


class Market:
    """The simulated network, as the driver of sequences wants it; it runs nothing."""

    backend = "akash"

    def __init__(self, folder: Path) -> None:
        self.ground = Ground(folder, behavior=Behavior(execute=False))
        self.options = {**self.ground.options, "settle_s": 0.0}
        self.simulator = self.ground.simulator

    def lose(self, choose: random.Random) -> None:
        self._fault(*CREATE, choose)

    def fail(self, choose: random.Random) -> None:
        self._fault(*choose.choice(CALLS), choose)

    def _fault(self, method: str, path: str, choose: random.Random) -> None:
        status, times = choose.choice((429, 500, 503, 0)), choose.randint(1, 3)
        self.simulator.faults.append(Fault(method, path, status, times=times, after=choose.random() < 0.6))

    def heal(self) -> None:
        self.simulator.faults.clear()

    def jobs(self) -> list[str]:
        return [attempt_of(deployment) for deployment in self.simulator.deployments.values()]

    def live(self) -> list[str]:
        return [attempt_of(self.simulator.deployments[dseq]) for dseq in self.simulator.active()]

    def check(self) -> None:
        """Nothing is billed, and no attempt has had two leases."""
        assert all(len(deployment["leases"]) <= 1 for deployment in self.simulator.deployments.values())
        self.simulator.deployments.clear()

    def close(self) -> None:
        self.ground.close()


def attempt_of(deployment: dict[str, Any]) -> str:
    env = dict(item.split("=", 1) for item in deployment["groups"][0]["services"][0]["env"])
    return env["CLOUDTRAIN_ATTEMPT_ID"]


@pytest.fixture
def market(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Market]:
    environment(monkeypatch)
    monkeypatch.setattr("cloudtrain.backends.http.PAUSE_S", 0.0)
    monkeypatch.setattr("cloudtrain.backends.http.TRIES", 2)
    monkeypatch.setattr("cloudtrain.backends.akash.backend.SIMULATED_PAUSE_S", 0.001)
    made = Market(tmp_path / "market")
    aws = Aws("akash", "us-east-1", None, made.ground.store.url)  # to make a client takes longer than all its calls
    monkeypatch.setattr(Aws, "session", aws.session)
    monkeypatch.setattr(Aws, "client", lambda _, service, client=aws.client("s3"): {"s3": client}[service])
    yield made
    made.close()


def sequences(market: Market, folder: Path, count: int, monkeypatch: pytest.MonkeyPatch, figure: Callable) -> None:
    first = first_seed()
    done: Counter[str] = Counter()
    with recorded(market.backend, monkeypatch):
        for seed in range(first, first + count):
            done += drive(market, folder / str(seed), seed)
    figure("sequences of lost answers, one job for each submission", count)
    assert done["submit"] >= count


def test_lost_answers_make_one_lease(market, tmp_path, monkeypatch, figure) -> None:
    sequences(market, tmp_path, NORMAL, monkeypatch, figure)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_lost_answers_make_one_lease(market, tmp_path, monkeypatch, figure) -> None:
    sequences(market, tmp_path, LONG, monkeypatch, figure)
