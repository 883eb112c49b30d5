"""security: restricted, network policies, CPU limits, quotas: what is planned, refused, and taken by a strict namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.kubernetes import fetch_pod
from cloudtrain.backends.kubernetes.rules import parse_quantity
from cloudtrain.backends.kubernetes.security import check_restricted
from tests.backends.kubernetes.locked_down import LockedDown, documented_rules
from tests.backends.kubernetes.test_request import made, problems
from tests.simulators.kubernetes_cluster.server import Cluster

RESTRICTED = {"security": "restricted"}
CLAIM = {"volumes": [{"claim": "shared", "path": "/data"}]}


class TestSimulated(LockedDown):
    @pytest.fixture
    def options(self, tmp_path: Path) -> Iterator[dict[str, Any]]:
        with Cluster(tmp_path / "cluster") as self.cluster:
            yield {"kubeconfig": str(self.cluster.kubeconfig), "image": "any:1", "poll_s": 0.1}

    def create_user(self, space: str, without: str, verb: str = "") -> str:
        rules = documented_rules(without, verb)
        allowed = {(verb, name) for rule in rules for verb in rule["verbs"] for name in rule["resources"]}
        resources = {*(name for _, name in allowed), without, "secrets"}
        verbs = ("create", "delete", "get", "list", "patch")
        self.cluster.resources.denied = {(verb, name) for verb in verbs for name in resources} - allowed
        return str(self.cluster.kubeconfig)

    def list_jobs(self, space: str) -> list[Any]:
        return self.cluster.objects.all("jobs", space)

    @contextmanager
    def end_token(self, space: str) -> Iterator[None]:
        token, self.cluster.token = self.cluster.token, "another"
        yield
        self.cluster.token = token


def pod_of(options: dict, **changes) -> dict[str, Any]:
    request = made(changes, options)
    assert request.problems == []
    return request.job["spec"]["template"]["spec"]


def test_every_container_that_we_make_fits_a_restricted_namespace():
    job = made({"output": "/data/out"}, RESTRICTED | CLAIM).job
    job["metadata"]["uid"] = "0-1"
    fetch = fetch_pod.build_pod(job, "fetch", "/data/out/run", "5" * 64)["spec"]
    for pod in (job["spec"]["template"]["spec"], fetch):
        assert list(check_restricted(pod)) == []
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert {violation.path.rpartition(".")[2] for violation in check_restricted(pod_of({}))} == {
        "allowPrivilegeEscalation", "drop", "runAsNonRoot", "type",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"securityContext": {"runAsUser": 0}}, "runAsUser"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "type"),
        ({"containers": [{"name": "node", "securityContext": {"privileged": True}}]}, "privileged"),
        ({"containers": [{"name": "node", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]}, "add"),
        ({"containers": [{"name": "node", "ports": [{"containerPort": 1, "hostPort": 1}]}]}, "ports"),
        ({"containers": [{"name": "other", "image": "x"}]}, "allowPrivilegeEscalation"),
        ({"volumes": [{"name": "n", "nfs": {"server": "s", "path": "/"}}]}, "nfs"),
    ],
)
def test_an_overlay_may_not_loosen_a_restricted_pod(change: dict, field: str):
    overlay = {"overlay": {"spec": {"template": {"spec": change}}}}
    found = problems({}, RESTRICTED | overlay)
    assert field in [path.rpartition(".")[2] for path in found], found
    assert problems({}, overlay) == [], "nobody asked for restricted"


def test_memory_is_locked_only_where_it_is_asked_for_and_never_in_a_restricted_pod():
    rdma = {"extended_resources": {"vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5120Mi"}}
    (node,) = pod_of(rdma)["containers"]
    assert "securityContext" not in node
    assert node["resources"]["limits"] == node["resources"]["requests"] == {
        "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi",
    }  # fmt: skip
    (node,) = pod_of(rdma | {"ipc_lock": True})["containers"]
    assert node["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert problems({}, RESTRICTED | {"ipc_lock": True}) == ["options.kubernetes.ipc_lock"]
    assert problems({}, {"extended_resources": {"hugepages-2Mi": "much"}}) != []


def test_a_path_of_the_host_is_mounted_only_where_it_is_allowed():
    def mounting(path: str, *allowed: str, **more) -> list[str]:
        volumes = [{"name": "host", "hostPath": {"path": path}}]
        overlay = {"spec": {"template": {"spec": {"volumes": volumes}}}}
        return problems({}, {"overlay": overlay, "allow_host_paths": list(allowed), **more})

    refused = ["options.kubernetes.overlay.spec.template.spec.volumes"]
    assert mounting("/opt/nvidia/lib64", "/opt/nvidia") == mounting("/opt", "/opt") == []
    assert mounting("/opt/nvidia2", "/opt/nvidia") == mounting("/opt", "/opt/nvidia") == mounting("/opt") == refused
    assert mounting("/opt/nvidia/../../etc", "/opt/nvidia") == refused
    found = mounting("/opt", "/opt", **RESTRICTED)
    assert len(found) == 1 and found[0].endswith(".hostPath")


def test_cpus_are_limited_where_it_is_asked_for():
    assert problems({}, {"cpu_limits": True}) == ["options.kubernetes.cpu_limits"]
    pod = pod_of({"cpu_limits": True}, resources={"cpus": 8})
    assert [c["resources"]["limits"]["cpu"] for c in (*pod["initContainers"], *pod["containers"])] == ["8", "8"]
    assert "limits" not in pod_of({}, resources={"cpus": 8})["containers"][0]["resources"]
    for options, limited in ({"cpu_limits": True}, True), ({}, False):
        job = made({"output": "/data/out", "resources": {"cpus": 8}}, options | CLAIM).job
        (fetch,) = fetch_pod.build_pod(job, "fetch", "/data/out/run", "5" * 64)["spec"]["containers"]
        assert ("cpu" in fetch["resources"]["limits"]) is limited, "a quota counts the pod that reads results too"


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("2", 2), ("1.5Gi", 1.5 * 2**30), ("3k", 3000), ("1e3", 1000)]
)
def test_quantities_are_numbers(text: str, number: float):
    assert float(parse_quantity(text)) == number
