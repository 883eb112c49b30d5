"""Machine types that the catalogue lacks: doctor asks EC2 for them, and a plan knows them from then on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends.sagemaker.backend import SagemakerBackend
from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job
from cloudtrain.simulators.sagemaker.server import Fault, Simulator
from cloudtrain.source.bundle import Bundle
from tests.backends.sagemaker.test_backend import options, simulator  # noqa: F401 - a fixture

NEW = "ml.g5g.16xlarge"  # EC2 has it, and SageMaker's catalogue has not


def test_a_plan_knows_the_types_that_doctor_has_seen(simulator: Simulator, tmp_path: Path, home: Path):  # noqa: F811
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print(1)\n")
    bundle = Bundle.make(tmp_path / "source", home / "bundles")
    backend = SagemakerBackend(options(simulator), home / "runs")

    def plan(accelerators: str | None = None, region: str = "us-east-1") -> list[str]:
        resources = {"instance_type": NEW, "accelerators": accelerators}
        job = Job.from_dict({"name": "j", "source": ".", "entrypoint": "train.py", "resources": resources})
        there = SagemakerBackend(options(simulator, region=region), home / "runs")
        return list(there.plan(job, bundle, "j").notes)

    with pytest.raises(BadJob, match="does not say what GPUs ml.g5g.16xlarge has"):
        plan()
    simulator.faults.append(Fault("DescribeInstanceTypes", 403, "UnauthorizedOperation", times=1))
    backend.check()
    with pytest.raises(BadJob, match="cloudtrain doctor, which asks EC2"):
        plan()
    backend.check()
    assert f"{NEW} has T4g x 2: 2 ranks run on each node" in plan()
    with pytest.raises(BadJob, match="has 2 x T4g, not A100:8"):
        plan("A100:8")
    with pytest.raises(BadJob, match="does not say what GPUs"):
        plan(region="eu-west-1")
