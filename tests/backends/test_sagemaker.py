"""The sagemaker backend against a simulator that executes: the contract suite, and what is particular to SageMaker."""

from __future__ import annotations

from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from cloudtrain.backends.sagemaker import SagemakerBackend
from cloudtrain.simulators.sagemaker import REGION, ROLE, Simulator
from cloudtrain.simulators.trainingjob import _inside
from cloudtrain.testing.contract import BackendContract

BUCKET = "training"


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = Simulator(tmp_path / "hosts")
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    with urlopen(Request(f"{found.url}/moto-api/reset", method="POST"), timeout=60):
        pass  # what other tests in this process have left with moto
    found.make_bucket(BUCKET)
    found.calls.clear()
    yield found
    found.close()


def options(simulator: Simulator, **more) -> dict:
    account = {"role": ROLE, "bucket": BUCKET, "region": REGION, "image": "any"}
    return {**account, "endpoint": simulator.url, "client": "boto3", **more}


class TestSagemaker(BackendContract):
    @pytest.fixture
    def connect(self, simulator: Simulator, home: Path):
        self.simulator = simulator
        return lambda: SagemakerBackend(options(simulator), home / "runs")

    def leftovers(self, handle: str) -> list[str]:
        name = handle.rpartition("/")[2]
        nodes = range(1, 5)
        return [str(pid) for n in nodes for pid in _inside(str(self.simulator.folder / name / f"algo-{n}"))]
