"""docs/kubernetes_recipes.md: each recipe is planned, its Job fits strict schemas, and it asks for what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cloudtrain.backends.kubernetes.backend import KubernetesBackend
from cloudtrain.backends.kubernetes.request import Request
from tests.backends.kubernetes.test_request import made, problems

PAGE = (Path(__file__).parents[3] / "docs" / "kubernetes_recipes.md").read_text("utf-8")
HEADINGS = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
NAMES = ("gke", "eks", "kueue", "jobset", "volcano", "scheduler-plugins", "runtime", "near")
RECIPES = dict(zip(NAMES, BLOCKS, strict=True))
RUNTIME = RECIPES.pop("runtime")


def request_of(recipe: dict[str, Any]) -> Request:
    changes, options = {**recipe}, recipe["options"]["kubernetes"]
    del changes["options"]
    KubernetesBackend.options()(**options)
    request = made(changes, options)
    assert request.problems == []
    return request


def planned(recipe: dict[str, Any]) -> dict[str, Any]:
    return request_of(recipe).job


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_a_job_that_a_server_takes(name: str):
    import kubernetes_validate

    assert len(HEADINGS) == len(BLOCKS) - 1
    for release in ("1.29", "1.37"):
        kubernetes_validate.validate(planned(RECIPES[name]), release, strict=True)


def test_the_daemon_of_gke_is_a_sidecar_that_sees_what_it_needs_of_the_host():
    template = planned(RECIPES["gke"])["spec"]["template"]
    first, daemon = template["spec"]["initContainers"]
    assert (first["name"], daemon["name"], daemon["restartPolicy"]) == ("source", "tcpxo-daemon", "Always")
    devices = yaml.safe_load(template["metadata"]["annotations"]["devices.gke.io/container.tcpxo-daemon"])
    networks = yaml.safe_load(template["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert (len(devices), len(networks)) == (11, 9)
    assert {"work", "shm", "nvidia"} <= {mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
    options = {**RECIPES["gke"]["options"]["kubernetes"], "allow_host_paths": ["/sys"]}
    assert problems({}, options) == ["options.kubernetes.overlay.spec.template.spec.volumes"] * 2


def test_the_others_ask_for_interfaces_a_queue_and_a_rack():
    (node,) = planned(RECIPES["eks"])["spec"]["template"]["spec"]["containers"]
    limits = node["resources"]["limits"]
    assert (limits["vpc.amazonaws.com/efa"], limits["hugepages-2Mi"]) == ("32", "5120Mi")
    assert node["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    queued = planned(RECIPES["kueue"])
    labels = {"kueue.x-k8s.io/queue-name": "research", "kueue.x-k8s.io/priority-class": "high"}
    assert labels.items() <= queued["metadata"]["labels"].items()
    assert "kueue.x-k8s.io/podset-required-topology" in queued["spec"]["template"]["metadata"]["annotations"]
    affinity = planned(RECIPES["near"])["spec"]["template"]["spec"]["affinity"]
    assert affinity.keys() == {"nodeAffinity", "podAffinity"}
    jobset = made({}, RECIPES["jobset"]["options"]["kubernetes"]).main
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in jobset["metadata"]["annotations"]


def test_pods_of_a_gang_name_its_group_and_scheduler():
    """scheduling.k8s.io/group-name: KubeGroupNameAnnotationKey of volcano.sh/apis; scheduling.x-k8s.io/pod-group:
    PodGroupLabel of sigs.k8s.io/scheduler-plugins (2026-11-29)."""
    for name, kind, key in (
        ("volcano", "annotations", "scheduling.k8s.io/group-name"),
        ("scheduler-plugins", "labels", "scheduling.x-k8s.io/pod-group"),
    ):
        template = planned(RECIPES[name])["spec"]["template"]
        assert template["metadata"][kind][key] == "my-group"
        assert (
            template["spec"]["schedulerName"].startswith(name)
            and "cloudtrain.dev/run" in template["metadata"]["labels"]
        )


def test_the_runtime_has_only_fields_of_its_schema():
    from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import (
        TrainerV1alpha1ClusterTrainingRuntime,
    )

    assert TrainerV1alpha1ClusterTrainingRuntime.from_dict(RUNTIME).to_dict() == RUNTIME
