"""Where a plan goes, as each provider's request says it: rules are checked against what is sent, `raw` included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends import registry
from cloudtrain.backends.api import Facts
from cloudtrain.job.job import Job
from cloudtrain.runs.planning.plan import Planner

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
    assert found == Facts("123456789012", "eu-west-1", ("ml.g5.2xlarge",), ("r/train:1",), False, 1)
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
    assert found == Facts("acme", "europe-west4", ("a2-highgpu-1g",), ("r/train:1",), None, 2)
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
    assert facts("akash", options, num_nodes=2) == Facts("", "", (), ("ghcr.io/acme/train:1",), None, 0)


def test_gpus_of_sagemaker(facts):
    """By the machines that are sent, whatever the job says of accelerators."""
    of = lambda **job: facts("sagemaker", AWS, **job).gpus  # noqa: E731
    assert of(resources={"instance_type": "ml.p4d.24xlarge"}, num_nodes=4) == 32
    assert of(resources={"instance_type": "ml.m5.large"}) == 0
    assert of(resources={"instance_type": "ml.p9.48xlarge", "accelerators": "H100:8"}) is None, "not in the catalog"
    groups = [{"name": "a", "instance_type": "ml.g5.xlarge", "count": 1}]
    groups += [{"name": "b", "instance_type": "ml.g5.2xlarge", "count": 2}]
    assert facts("sagemaker", {**AWS, "instance_groups": groups}, num_nodes=3).gpus == 3


def test_gpus_of_vertex(facts):
    of = lambda **job: facts("vertex", GOOGLE, **job).gpus  # noqa: E731
    assert of(resources={"accelerators": "T4:1", "instance_type": "n1-standard-8"}, num_nodes=3) == 3
    assert of(resources={"instance_type": "n1-standard-8"}) == of(resources={"instance_type": "n2-standard-2"}) == 0
    assert of(resources={"instance_type": "x9-highgpu-8g"}) is None, "not in the catalog"


def test_gpus_of_kubernetes(facts):
    of = lambda options, **job: facts("kubernetes", {"image": "i", **options}, output="s3://b/x", **job).gpus  # noqa: E731
    assert of({}, resources={"accelerators": "H100:8"}, num_nodes=2) == 16
    assert of({}) == 0
    assert of({"extended_resources": {"nvidia.com/mig-1g.10gb": 2, "rdma/hca": 8}}) == 2
    assert of({"kind": "jobset"}, resources={"accelerators": "H100:8"}, num_nodes=2) == 16
    containers = [{"name": "more", "image": "x", "resources": {"limits": {"amd.com/gpu": "4"}}}]
    overlay: dict[str, Any] = {"containers": containers}
    assert of({"overlay": {"spec": {"template": {"spec": overlay}}}}, resources={"accelerators": "H100:1"}) == 5
    overlay = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight"}]}
    assert of({"overlay": {"spec": {"template": {"spec": overlay}}}}) is None, "only the cluster knows"


def test_gpus_of_akash_and_of_machines_of_your_own(facts, tmp_path: Path):
    options = {"store": "s3://b/ct", "image": "ghcr.io/acme/train:1", "max_usd_per_hour": 1}
    assert facts("akash", options, num_nodes=2, resources={"accelerators": "H100:4"}).gpus == 8
    for accelerators, gpus in ((None, None), ("0", 0), ("A100:4", 4)):
        plan = Planner("local").plan(
            Job(entrypoint="train.py", source=".", resources={"accelerators": accelerators} if accelerators else {})
        )
        assert registry.create_for(plan, tmp_path).facts(plan).gpus == gpus
    found = facts("local", {}, roles={"trainer": {}, "server": {"run": "serve"}})
    assert found.gpus is None, "the trainer takes all GPUs of this machine"


SBATCH = {  # options of a target or job on 2 nodes, and what sbatch gives
    "": ({}, 0),
    "accelerators": ({"accelerators": "A100:4"}, 8),
    "gres": ({"gres": "gpu:a100:8,nvme:1"}, 16),
    "gres without a count": ({"gres": "gpu"}, 2),
    "gres with a type": ({"gres": "gres:gpu:a100:4(S:0-1)"}, 8),
    "no GPUs": ({"gres": "craynetwork:1"}, 0),
    "parts of a GPU": ({"gres": "shard:4"}, None),
    "in all": ({"directives": ["--gpus=a100:6"]}, 6),
    "in all, short": ({"directives": ["-G6"]}, 6),
    "of each node": ({"directives": ["--gpus-per-node=8"]}, 16),
    "cut short": ({"directives": ["--gpus-per-n=8"]}, None),
    "of each task": ({"directives": ["--gpus-per-task=8"]}, None),
    "tres": ({"directives": ["--tres-per-task=gres/gpu:8"]}, None),
    "whole nodes": ({"exclusive": True}, None),
    "whole nodes, as a directive": ({"directives": ["--exclusive"]}, None),
    "of one user": ({"directives": ["--exclusive=user", "--exclude=n1", "--mem-per-gpu=8G", "--gpu-bind=none"]}, 0),
}


@pytest.mark.parametrize("case", SBATCH)
def test_gpus_of_slurm(case: str, facts, tmp_path: Path):
    options, gpus = SBATCH[case]
    resources = {"accelerators": options["accelerators"]} if "accelerators" in options else {}
    given = {name: value for name, value in options.items() if name != "accelerators"}
    found = facts("slurm", {"folder": str(tmp_path), **given}, num_nodes=2, resources=resources)
    assert found == Facts(gpus=gpus)
