"""`doctor` on a cluster: what is not there, and whether it would take the pods of a job."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.backends.kubernetes.request import MAX_INLINE_BYTES
from cloudtrain.errors import BadRequest
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle, File
from tests.backends.kubernetes.locked_down import ENFORCE
from tests.simulators.kubernetes_cluster.server import Cluster

CODE = Bundle(Path("x.tar.gz"), "5" * 64, "6" * 64, 1000, (File("train.py", 1, 0o644),), None, False, "/")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as made:
        yield made


def backend_of(cluster: Cluster, **options) -> KubernetesBackend:
    return KubernetesBackend({"kubeconfig": str(cluster.kubeconfig), "image": "any:1", **options}, Path("/nowhere"))


def found(cluster: Cluster, **options) -> list[str]:
    return [problem.message for problem in backend_of(cluster, **options).check()]


def probed(cluster: Cluster, options: dict | None = None, **changes) -> list[str]:
    backend = backend_of(cluster, **(options or {}))
    job = Job.from_dict({"name": "tried", "source": "/", "entrypoint": "train.py", **changes})
    return [problem.message for problem in backend.probe(backend.plan(job, CODE, "tried-run"))]


def test_what_a_target_names_and_the_cluster_lacks(cluster: Cluster):
    assert found(cluster) == []
    assert found(cluster, namespace="nowhere") == ["there is no namespace nowhere"]
    assert found(cluster, pull_secrets=["registry"]) == ["default has no secret registry"]
    assert found(cluster, service_account="trainer") == ["default has no serviceaccount trainer"]
    cluster.objects.add("secrets", "default", {"metadata": {"name": "registry"}})
    cluster.objects.add("serviceaccounts", "default", {"metadata": {"name": "trainer"}})
    assert found(cluster, pull_secrets=["registry"], service_account="trainer") == []
    cluster.resources.denied |= {("get", "namespaces"), ("get", "secrets")}
    assert found(cluster, namespace="nowhere", pull_secrets=["none"]) == [], "what may not be asked is no problem"


def test_a_queue_needs_kueue_and_has_to_be_there(cluster: Cluster):
    assert found(cluster, queue="research") == ["the cluster has no Kueue"]
    cluster.queues.add("other")
    assert found(cluster, queue="research") == ["Kueue has no LocalQueue research in default"]
    assert found(cluster, queue="other") == []


def test_a_jobset_needs_its_operator_and_its_own_permissions(cluster: Cluster):
    cluster.resources.denied |= {("create", "jobs"), ("patch", "jobs"), ("create", "services")}
    assert len(found(cluster)) == 3 and found(cluster, kind="jobset") == []
    assert probed(cluster, {"kind": "jobset"}) == []
    cluster.kubelet.operators.clear()
    cluster.resources.denied |= {("create", "jobsets")}
    assert found(cluster, kind="jobset") == [
        "you have no permission to create jobsets in default, which cloudtrain needs to submit",
        "the cluster has no JobSet operator",
    ]


def test_gpus_of_a_type_that_no_node_has_are_named_with_those_that_there_are(cluster: Cluster):
    machine = cluster.kubelet.node
    machine["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    machine["metadata"]["labels"]["nvidia.com/gpu.product"] = "A100"
    said = backend_of(cluster, node_selector={"nvidia.com/gpu.product": "H100"}).capacity()
    assert "0 nodes that match the node_selector (no node has nvidia.com/gpu.product=H100, but A100)" in said
    assert backend_of(cluster, node_selector={"nvidia.com/gpu.product": "A100"}).capacity().startswith("8 of")


def test_a_job_is_tried_against_pod_security(cluster: Cluster):
    assert probed(cluster) == []
    namespace = cluster.objects.get("namespaces", "", "default")
    assert namespace is not None
    namespace["metadata"]["labels"] = ENFORCE
    (refused,) = probed(cluster)
    assert 'violates PodSecurity "restricted' in refused and "runAsNonRoot" in refused
    assert probed(cluster, {"security": "restricted"}) == []
    assert cluster.objects.all("pods") == [], "a dry run"
    cluster.resources.denied.add(("create", "pods"))
    assert probed(cluster) == []


def test_a_field_of_an_overlay_that_the_server_does_not_know_is_found(cluster: Cluster):
    overlay = {"spec": {"template": {"spec": {"tolerationz": [{"key": "team"}]}}}}
    (unknown,) = probed(cluster, {"overlay": overlay})
    assert 'unknown field "spec.tolerationz"' in unknown
    assert probed(cluster, {"overlay": {"spec": {"template": {"spec": {"tolerations": [{"key": "team"}]}}}}}) == []


def test_a_job_is_held_against_the_quotas_with_all_its_pods(cluster: Cluster):
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"requests.nvidia.com/gpu": "8", "pods": "10"}}}
    cluster.objects.add("resourcequotas", "default", {**quota, "status": {"used": {"requests.nvidia.com/gpu": "4"}}})
    gpus = {"resources": {"accelerators": "H100:4"}}
    assert probed(cluster, **gpus) == []
    (two,) = probed(cluster, num_nodes=2, **gpus)
    assert two == "2 pods need 8 of requests.nvidia.com/gpu, and the quota team has 4 left"
    (many,) = probed(cluster, num_nodes=11)
    assert many == "11 pods need 11 of pods, and the quota team has 10 left"
    (large,) = probed(cluster, resources={"accelerators": "H100:16"})
    assert "exceeded quota: team" in large


def test_manifests_for_kubectl_hold_the_source_where_they_can(tmp_path: Path):
    backend = KubernetesBackend({"server": "https://10.0.0.1", "image": "any:1"}, tmp_path)
    job = Job.from_dict({"name": "tried", "source": "/", "entrypoint": "train.py"})
    made = list(yaml.safe_load_all(backend.manifests(backend.plan(job, CODE, "tried-run"), b"the source")))
    assert "Job" in [each["kind"] for each in made]
    assert base64.b64encode(b"the source").decode() in json.dumps(made)
    large = replace(CODE, size_bytes=MAX_INLINE_BYTES + 1)
    with pytest.raises(BadRequest, match="too large for a ConfigMap"):
        backend.manifests(backend.plan(job.replace(output="gs://bucket/out"), large, "tried-run"), b"")
