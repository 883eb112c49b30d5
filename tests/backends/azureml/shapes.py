"""Twelve job shapes, as a job file and as the arguments of azure-ai-ml's `command(...)`; imports neither of the two."""

from __future__ import annotations

SUBSCRIPTION = "00000000-1111-2222-3333-444444444444"
WORKSPACE = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/group/providers/Microsoft.MachineLearningServices/workspaces/space"
)
OPTIONS = {
    "subscription": SUBSCRIPTION,
    "resource_group": "group",
    "workspace": "space",
    "store": "az://jobs@account/home",
}
IMAGE = {"image": "registry.azurecr.io/train:1"}
COMPUTE = f"{WORKSPACE}/computes/gpus"
CURATED = "azureml:acpt-pytorch@latest"

DATASTORE = "azureml://datastores/workspaceblobstore/paths/words"

# name -> keys of the job, options beside OPTIONS, arguments of command(...) beside COMMON
SHAPES: dict[str, tuple[dict, dict, dict]] = {
    "cpu": ({}, {}, {"instance_type": "Standard_D4s_v3", "timeout": 87330}),
    "gpus": (
        {"resources": {"accelerators": "A100-80GB:4"}},
        {},
        {"instance_type": "Standard_NC96ads_A100_v4", "timeout": 87330},
    ),
    "two-nodes": (
        {"num_nodes": 2, "resources": {"accelerators": "H100:8"}},
        {},
        {"instance_type": "Standard_ND96isr_H100_v5", "instance_count": 2, "distribution": 1, "timeout": 87330},
    ),
    "spot": (
        {"resources": {"accelerators": "T4", "use_spot": True}},
        {},
        {"instance_type": "Standard_NC4as_T4_v3", "job_tier": "spot", "timeout": 87330},
    ),
    "cluster": (
        {"num_nodes": 3},
        {"compute": "gpus"},
        {"compute": COMPUTE, "instance_count": 3, "distribution": 1, "timeout": 87330},
    ),
    "identity": (
        {"resources": {"instance_type": "Standard_E8s_v5"}},
        {"identity": "managed", "client_id": "99999999-1111-2222-3333-444444444444"},
        {"instance_type": "Standard_E8s_v5", "timeout": 87330, "identity": "99999999-1111-2222-3333-444444444444"},
    ),
    "user": (
        {"limits": {"max_runtime": "15m", "grace": "60s"}},
        {"identity": "user"},
        {"instance_type": "Standard_D4s_v3", "timeout": 1860, "identity": "user"},
    ),
    "ssh": (
        {"num_nodes": 2},
        {"compute": "gpus", "ssh_public_key": "ssh-ed25519 AAAA me"},
        {"compute": COMPUTE, "instance_count": 2, "distribution": 1, "timeout": 87330, "ssh": "ssh-ed25519 AAAA me"},
    ),
    "priority": (
        {"resources": {"cpus": 12}},
        {"priority": "high"},
        {"instance_type": "Standard_D16s_v3", "timeout": 87330, "job_tier": "standard", "priority": "high"},
    ),
    "memory": (
        {"limits": {"max_runtime": "2d"}, "resources": {"accelerators": "H100-NVL:2"}},
        {"shm_gb": 64},
        {"instance_type": "Standard_NC80adis_H100_v5", "shm_size": "64g", "timeout": 173730},
    ),
    "labels": (
        {"labels": {"team": "nlp", "cost": "x"}, "image": None},
        {"environment": CURATED, "experiment": "study"},
        {
            "instance_type": "Standard_D4s_v3",
            "timeout": 87330,
            "tags": {"team": "nlp", "cost": "x"},
            "experiment_name": "study",
            "environment": CURATED,
        },
    ),
    "datastores": (
        {
            "inputs": {
                "train-set": f"{DATASTORE}/train/",
                "labels": {"uri": f"{DATASTORE}/labels.csv", "mode": "mount"},
                "web": {"uri": f"{DATASTORE}/web", "mode": "stream"},
            },
            "output": f"{DATASTORE}/runs/",
        },
        {},
        {
            "instance_type": "Standard_D4s_v3",
            "timeout": 87330,
            "inputs": {
                "input_train_set": ("uri_folder", f"{DATASTORE}/train/", "download"),
                "input_labels": ("uri_file", f"{DATASTORE}/labels.csv", "ro_mount"),
                "input_web": ("uri_folder", f"{DATASTORE}/web", "direct"),
            },
            "outputs": {"results": ("uri_folder", f"{DATASTORE}/runs/run", "rw_mount")},
        },
    ),
}
