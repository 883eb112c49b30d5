"""The place of a node, read from what every platform sets."""

from __future__ import annotations

import json

import pytest
from launcher.errors import Refused
from launcher.world.cluster import CONTROL_PORT, Cluster, absolute, expand_hosts, in_groups, resolve


def place(found: Cluster) -> tuple:
    return (
        found.platform,
        found.nodes,
        found.node_rank,
        found.control_host,
        found.control_port,
        found.master_host,
        found.master_port,
    )


VERTEX_HOSTS = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
}


def vertex(pool: str, index: int, pools: dict | None = None) -> dict[str, str]:
    spec = {
        "cluster": pools or VERTEX_HOSTS,
        "environment": "cloud",
        "task": {"type": pool, "index": index, "trial": ""},
        "job": "{}",
    }
    # The platform's own RANK and WORLD_SIZE count nodes; there is no LOCAL_RANK.
    return {
        "CLUSTER_SPEC": json.dumps(spec),
        "RANK": "2",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "gk3-x",
        "MASTER_PORT": "3333",
        "TF_CONFIG": "{}",
        "AIP_MODEL_DIR": "gs://b/model/",
    }


SAGEMAKER = {
    "SM_HOSTS": '["algo-10", "algo-2", "algo-1"]',
    "SM_CURRENT_HOST": "algo-10",
    "SM_NUM_GPUS": "8",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_CHANNELS": "[]",
}
RESOURCES = json.dumps(
    {
        "current_host": "algo-2",
        "hosts": ["algo-1", "algo-2"],
        "network_interface_name": "ethwe",
        "current_instance_type": "ml.p4d.24xlarge",
        "current_group_name": "homogeneousCluster",
    }
)
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "spk[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}

PLACES = {
    "local alone": ({}, ("local", 1, 0, "", 0, "127.0.0.1", 0)),
    "local node 0": (
        {"CLOUDTRAIN_NODE_RANK": "0", "CLOUDTRAIN_HOST": "127.0.0.1"},
        ("local", None, 0, "127.0.0.1", 0, "127.0.0.1", 0),
    ),
    "local node 1": (
        {"CLOUDTRAIN_NODE_RANK": "1", "CLOUDTRAIN_HOST": "127.0.0.1", "CLOUDTRAIN_CONTROL": "127.0.0.1:4000"},
        ("local", None, 1, "127.0.0.1", 4000, "127.0.0.1", 0),
    ),
    "ssh node 0 with a port": (
        {"CLOUDTRAIN_NODE_RANK": "0", "CLOUDTRAIN_HOST": "10.0.0.5", "CLOUDTRAIN_CONTROL": ":29400"},
        ("local", None, 0, "10.0.0.5", 29400, "10.0.0.5", 0),
    ),
    "ssh node 2 over IPv6": (
        {"CLOUDTRAIN_NODE_RANK": "2", "CLOUDTRAIN_HOST": "fd00::2", "CLOUDTRAIN_CONTROL": "[fd00::1]:29400"},
        ("local", None, 2, "fd00::1", 29400, "fd00::1", 0),
    ),
    "local within a Slurm job": (
        SLURM | {"CLOUDTRAIN_NODE_RANK": "0"},
        ("local", None, 0, "127.0.0.1", 0, "127.0.0.1", 0),
    ),
    "already launched": (
        {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "29500",
        },
        ("launched", None, 1, "", 0, "h", 29500),
    ),
    "launched by the torchrun of SageMaker's toolkit": (
        SAGEMAKER | {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"},
        ("sagemaker", 3, 2, "algo-1", CONTROL_PORT, "algo-1", 7777),
    ),
    "sagemaker by the toolkit": (SAGEMAKER, ("sagemaker", 3, 2, "algo-1", CONTROL_PORT, "algo-1", 0)),
    "vertex alone": (vertex("workerpool0", 0, {"workerpool0": ["h:2222"]}), ("vertex", 1, 0, "h", 2222, "h", 3333)),
    "vertex primary": (
        vertex("workerpool0", 0),
        ("vertex", 3, 0, "cmle-training-workerpool0-ab-0", 2222, "cmle-training-workerpool0-ab-0", 3333),
    ),
    "vertex second worker": (
        vertex("workerpool1", 1),
        ("vertex", 3, 2, "cmle-training-workerpool0-ab-0", 2222, "cmle-training-workerpool0-ab-0", 3333),
    ),
    "kubernetes": (
        {
            "JOB_COMPLETION_INDEX": "1",
            "CLOUDTRAIN_NUM_NODES": "2",
            "MASTER_ADDR": "job-0.svc",
            "KUBERNETES_SERVICE_HOST": "10.1.1.1",
        },
        ("kubernetes", 2, 1, "job-0.svc", CONTROL_PORT, "job-0.svc", 0),
    ),
    "kubernetes alone": (
        {"JOB_COMPLETION_INDEX": "0"},
        ("kubernetes", None, 0, "127.0.0.1", CONTROL_PORT, "127.0.0.1", 0),
    ),
    "kubeflow": (
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_NPROC_PER_NODE": "auto",
            "PET_MASTER_ADDR": "m-0.m",
            "PET_MASTER_PORT": "29400",
            "JOB_COMPLETION_INDEX": "1",
        },
        ("kubeflow", 2, 1, "m-0.m", CONTROL_PORT, "m-0.m", 29400),
    ),
    "kubeflow elastic": (
        {"PET_NNODES": "1:4", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m"},
        ("kubeflow", 4, 0, "m", CONTROL_PORT, "m", 0),
    ),
    "slurm": (SLURM, ("slurm", 2, 1, "spk1", 24242, "spk1", 0)),
    "slurm with a component for each role": (
        SLURM
        | {
            "SLURM_JOB_ID": "4243",  # of the second component
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "2",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_ID_HET_GROUP_0": "4242",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "spk[1-2]",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu7",
        },
        ("slurm", 3, 2, "spk1", 24242, "spk1", 0),
    ),
    "Slurm, two launchers on each node": (
        {
            "SLURM_JOB_ID": "4242",
            "SLURM_NODEID": "1",
            "SLURM_PROCID": "3",
            "SLURM_NNODES": "2",
            "SLURM_STEP_NODELIST": "gpu[1-2]",
            "CLOUDTRAIN_LAUNCHERS": "2",
        },
        ("slurm", 4, 3, "gpu1", 24242, "gpu1", 0),
    ),
    "Slurm, two launchers on each node of the first component": (
        {
            "SLURM_JOB_ID": "4242",
            "SLURM_NODEID": "1",
            "SLURM_PROCID": "4",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_ID_HET_GROUP_0": "4242",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu1",
            "CLOUDTRAIN_LAUNCHERS": "2,1",
        },
        ("slurm", 5, 4, "gpu1", 24242, "gpu1", 0),
    ),
    "ranks that count nodes": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "w-0", "MASTER_PORT": "23456"},
        ("generic", 2, 1, "w-0", CONTROL_PORT, "w-0", 23456),
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_every_platform_says_where_a_node_stands(case: str):
    environ, wanted = PLACES[case]
    assert place(resolve(environ)) == wanted


def test_sagemaker_without_its_toolkit_is_read_from_its_file():
    found = resolve({"TRAINING_JOB_NAME": "j"}, RESOURCES)
    assert (found.platform, found.nodes, found.node_rank, found.hosts, found.master_host, found.interface) == (
        "sagemaker",
        2,
        1,
        ("algo-1", "algo-2"),
        "algo-1",
        "ethwe",
    )


def test_hosts_are_in_order_of_their_numbers_on_every_node():
    ranks = {name: resolve(SAGEMAKER | {"SM_CURRENT_HOST": name}).node_rank for name in ("algo-1", "algo-2", "algo-10")}
    assert ranks == {"algo-1": 0, "algo-2": 1, "algo-10": 2}


def test_gpus_come_with_any_platform():
    assert resolve({"CLOUDTRAIN_GPUS": "2,3"}).gpus == "2,3"
    assert resolve(SLURM | {"CLOUDTRAIN_GPUS": ""}).gpus == ""
    assert resolve(SLURM).gpus is None
    assert resolve({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}).launched


UNREADABLE = {
    "vertex reduction server": (
        vertex("workerpool2", 0),
        "this replica belongs to workerpool2, which does not train",
    ),
    "vertex nonsense": ({"CLUSTER_SPEC": "{"}, "the platform's environment cannot be read"),
    "vertex without a task": ({"CLUSTER_SPEC": "{}"}, "the platform's environment cannot be read"),
    "sagemaker stranger": (
        SAGEMAKER | {"SM_CURRENT_HOST": "algo-9"},
        "this host, algo-9, is not one of SageMaker's hosts",
    ),
    "slurm list": (SLURM | {"SLURM_JOB_NODELIST": "spk1"}, "Slurm gave 2 nodes but names 1: spk1"),
    "kubernetes without an address": ({"JOB_COMPLETION_INDEX": "1"}, "MASTER_ADDR is not set"),
    "kubeflow without an address": ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_MASTER_ADDR is not set"),
    "not a number": ({"CLOUDTRAIN_NODE_RANK": "x"}, "the platform's environment cannot be read"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_understood_is_refused(case: str):
    environ, reason = UNREADABLE[case]
    with pytest.raises(Refused) as refused:
        resolve(environ)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[08-11,3],login", ("n08", "n09", "n10", "n11", "n3", "login")),
        ("a[1-2]b[3-4]", ("a1b3", "a1b4", "a2b3", "a2b4")),
        ("gpu-a[1,3]-x.site.org,z", ("gpu-a1-x.site.org", "gpu-a3-x.site.org", "z")),
        ("", ()),
    ],
)
def test_slurm_lists_are_expanded(text: str, hosts: tuple):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("search team.svc.cluster.local svc.cluster.local cluster.local\n", "run-0.run.team.svc.cluster.local."),
        ("nameserver 10.0.0.1\nsearch team.svc.example.org.\n", "run-0.run.team.svc.example.org."),
        ("search example.org\n", "run-0.run"),
        ("search\n", "run-0.run"),
        (None, "run-0.run"),
    ],
)
def test_a_pod_asks_for_another_one_by_its_whole_name(tmp_path, text, name):
    if text is not None:
        (tmp_path / "resolv.conf").write_text(text)
    assert absolute("run-0.run", str(tmp_path / "resolv.conf")) == name


def test_other_names_are_asked_for_as_they_are(tmp_path):
    (tmp_path / "resolv.conf").write_text("search team.svc.cluster.local\n")
    for name in ("10.0.0.7", "node", "a.b.c", "fd00::1"):
        assert absolute(name, str(tmp_path / "resolv.conf")) == name


def test_nodes_of_instance_groups_are_in_the_order_of_the_roles():
    groups = {"server": ["algo-1"], "trainer": ["algo-10", "algo-3"], "judge": ["algo-2"]}
    config = {
        "current_host": "algo-10",
        "hosts": ["algo-1", "algo-2", "algo-3", "algo-10"],
        "instance_groups": [{"instance_group_name": name, "hosts": hosts} for name, hosts in groups.items()],
    }
    text = json.dumps(config)
    found = resolve({}, text)
    placed = in_groups(found, text, ["trainer", "judge", "server"])
    assert placed.hosts == ("algo-3", "algo-10", "algo-2", "algo-1")
    assert place(placed) == ("sagemaker", 4, 1, "algo-3", CONTROL_PORT, "algo-3", found.master_port)
    for names in ([], ["trainer", "other"]):
        assert in_groups(found, text, names) == found
    elsewhere = found._replace(platform="kubernetes")
    assert in_groups(elsewhere, text, ["trainer"]) == elsewhere
