"""The variables by which TensorFlow, JAX and Keras find their world, and the ports that nodes hold for them."""

from __future__ import annotations

import json

import pytest
from launcher import manifest as manifests
from launcher.world import frameworks, ports
from launcher.world.channel import World

from cloudtrain.backends.manifest import Manifest

WORLD = World(2, 1, "10.0.0.1", 2222, ["10.0.0.1", "fd00::2"], {}, [[4001, 4002], [4003, 4004]])


def plan(framework: str, gpus: int = 0) -> manifests.Manifest:
    made = Manifest("run", 1, ("train.py",), 2, 2, framework=framework, gpus_per_node=gpus)
    return manifests.decode(made.encode())


def variables(framework: str, gpus: int = 0, **env: str) -> dict[str, str]:
    return frameworks.variables(plan(framework, gpus), WORLD, 1, env)


def test_tensorflow_knows_every_worker_and_its_own_number():
    assert list(found := variables("tensorflow")) == ["TF_CONFIG"]
    assert json.loads(found["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:4001", "10.0.0.1:4002", "[fd00::2]:4003", "[fd00::2]:4004"]},
        "task": {"type": "worker", "index": 3},
    }


def test_jax_takes_the_variables_of_open_mpi():
    assert variables("jax") == {
        "OMPI_MCA_orte_hnp_uri": "cloudtrain",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:2222",
    }


def test_keras_has_its_own_and_those_of_both_that_it_runs_on():
    own = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:2222",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "4",
        "KERAS_DISTRIBUTION_PROCESS_ID": "3",
    }
    assert variables("keras") == {**own, **variables("jax"), **variables("tensorflow")}


@pytest.mark.parametrize(
    ("framework", "env", "expected"),
    [
        ("jax", {}, {"JAX_LOCAL_DEVICE_IDS": "2,3"}),
        ("tensorflow", {}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ("tensorflow", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        ("keras", {}, {"CUDA_VISIBLE_DEVICES": "2,3", "JAX_LOCAL_DEVICE_IDS": "0,1"}),
    ],
)
def test_each_rank_has_its_share_of_the_gpus(framework: str, env: dict[str, str], expected: dict[str, str]):
    found = variables(framework, 4, **env)
    assert {name: found[name] for name in found if name.endswith(("_DEVICES", "_DEVICE_IDS"))} == expected


@pytest.mark.parametrize(("framework", "count"), [("", 0), ("jax", 0), ("tensorflow", 2), ("keras", 2)])
def test_a_node_holds_a_port_for_each_worker_of_tensorflow(framework: str, count: int):
    held = ports.hold_all(plan(framework))
    try:
        assert len(set(ports.numbers(held))) == count
    finally:
        for each in held:
            each.close()
