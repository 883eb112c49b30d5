"""Where a plan goes, as each provider's request says it: rules are checked against what is sent, `raw` included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.api import Facts
from cloudtrain.job.job import Job
from cloudtrain.runs.plan import Planner

ROLE = "arn:aws:iam::123456789012:role/training"
AWS = {"role": ROLE, "bucket": "my-bucket", "region": "eu-west-1", "image": "r/train:1", "client": "boto3"}
GOOGLE = {"project": "acme", "bucket": "acme-runs", "region": "europe-west4", "image": "r/train:1", "client": "rest"}
GPU = {"accelerators": "A100-40GB:1"}


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "train.py").write_text("print(1)\n")

    def of(backend: str, options: dict[str, Any], **job: Any) -> Facts:
        plan = Planner(backend, **options).plan(
            Job(entrypoint="train.py", source=".", environment={"requirements": "none"}, **job)
        )
        made = registry.create_for(plan, tmp_path)
        return made.facts(plan)  # type: ignore[attr-defined]

    return of


def test_sagemaker(facts):
    machine = {"resources": {"instance_type": "ml.g5.2xlarge"}}
    found = facts("sagemaker", AWS, **machine)
    assert found == Facts("123456789012", "eu-west-1", ("ml.g5.2xlarge",), ("r/train:1",), False)
    assert facts("sagemaker", {**AWS, "isolate": True}, **machine).isolated
    assert facts("sagemaker", {**AWS, "account": "123456789012", "region": None}, **machine).region == ""
    groups = [
        {"name": name, "instance_type": f"ml.{kind}", "count": 1}
        for name, kind in (("a", "g5.xlarge"), ("b", "g5.2xlarge"))
    ]
    found = facts("sagemaker", {**AWS, "instance_groups": groups}, num_nodes=2)
    assert found.instance_types == ("ml.g5.xlarge", "ml.g5.2xlarge")


def test_vertex(facts):
    found = facts("vertex", GOOGLE, resources=GPU, num_nodes=2)
    assert found == Facts("acme", "europe-west4", ("a2-highgpu-1g",), ("r/train:1",), None)
    pools = {"jobSpec": {"workerPoolSpecs": [{"machineSpec": {"machineType": "a2-ultragpu-8g"}}]}}
    assert facts("vertex", {**GOOGLE, "raw": pools}, resources=GPU).instance_types != ("a2-highgpu-1g",)


def test_kubernetes(facts):
    options = {
        "image": "r/train@sha256:1",
        "overlay": {"spec": {"template": {"spec": {"containers": [{"name": "more", "image": "r/x"}]}}}},
    }
    found = facts("kubernetes", options, resources={"instance_type": "p5.48xlarge"}, output="s3://b/x")
    assert found.instance_types == ("p5.48xlarge",) and set(found.images or ()) == {"r/train@sha256:1", "r/x"}
    assert facts("kubernetes", {"image": "i", "kind": "jobset"}).instance_types == ()
    assert (found.account, found.region, found.isolated) == (None, None, None)


def test_akash(facts):
    """The images of its services; what only bids decide is not known."""
    options = {"store": "s3://b/ct", "image": "ghcr.io/acme/train:1", "max_usd_per_hour": 1}
    assert facts("akash", options, num_nodes=2) == Facts("", "", (), ("ghcr.io/acme/train:1",), None)
