"""The sagemaker backend against a simulator that executes: the contract suite, and what is particular to SageMaker."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.events import State
from cloudtrain.simulators.sagemaker.host import find_processes
from cloudtrain.simulators.sagemaker.server import REGION, ROLE, Simulator
from cloudtrain.testing.contract import BackendContract

BUCKET = "training"
sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))
iam = import_module("iam")
sys.path.pop(0)


@pytest.fixture
def simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = Simulator(tmp_path / "hosts")
    for name, value in started.environ.items():
        monkeypatch.setenv(name, value)
    with urlopen(Request(f"{started.url}/moto-api/reset", method="POST"), timeout=60):
        pass  # what other tests in this process have left with moto
    started.make_bucket(BUCKET)
    started.calls.clear()
    yield started
    started.close()
    calls = [
        call for call in started.calls if call.partition(":")[0] in ("sagemaker", "s3", "logs", "iam", "ecr", "ec2")
    ]
    assert set(iam.actions(calls)) <= iam.listed(), "docs/sagemaker.md does not list what was called: docs/iam.py"


def options(simulator: Simulator, **more) -> dict:
    account = {"role": ROLE, "bucket": BUCKET, "region": REGION, "image": "any"}
    return {**account, "endpoint": simulator.url, "client": "boto3", **more}


def test_the_list_of_actions_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "restored afterwards")
    assert iam.page(iam.table(iam.record(tmp_path))) == iam.PAGE.read_text("utf-8"), "run python docs/iam.py"
    assert "sagemaker:CreateTrainingJob" in iam.listed() and "s3:DeleteBucket" not in iam.listed()


class TestSagemaker(BackendContract):
    @pytest.fixture
    def connect(self, simulator: Simulator, home: Path):
        self.simulator = simulator
        return lambda: SagemakerBackend(options(simulator), home / "runs")

    def test_a_manifest_over_64_kib_arrives(self, backend, start) -> None:
        digits = random.Random(1).randbytes(60_000).hex()  # one argument of execve has at most 128 KiB
        handle = start("import sys; print(len(sys.argv[1]))", args=[digits])
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        assert self.script_lines(backend, handle)[0].text == "120000"
        sent = self.simulator.jobs[handle.rpartition("/")[2]].request["HyperParameters"]
        assert not [name for name in sent if name.startswith("ct_manifest")]

    def test_a_model_that_is_not_compressed_is_fetched(self, backend, start, tmp_path: Path) -> None:
        backend._options |= {"compress": False}
        handle = start("import os; open(os.environ['CLOUDTRAIN_MODEL_DIR'] + '/weights', 'w').write('7')")
        assert self.until_final(backend, handle).state is State.SUCCEEDED, self.text(backend, handle)
        assert (backend.fetch(handle, tmp_path / "out") / "model" / "weights").read_text() == "7"

    def calls(self) -> int:
        return len(self.simulator.calls)

    def leftovers(self, handle: str) -> list[str]:
        name = handle.rpartition("/")[2]
        nodes = range(1, 5)
        return [str(pid) for n in nodes for pid in find_processes(str(self.simulator.folder / name / f"algo-{n}"))]
