"""The catalogue of machine types: every table can be read, and a wish finds the smallest machine that has it."""

from __future__ import annotations

import pytest

from cloudtrain.backends import machines
from cloudtrain.errors import Problem
from cloudtrain.job.sections import Resources

TABLES = sorted(path.parent.name for path in machines.FOLDER.glob("*/machines.csv"))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_where_it_comes_from_and_when(name: str) -> None:
    head = [line for line in (machines.FOLDER / name / "machines.csv").read_text().splitlines() if line.startswith("#")]
    assert any("2026-" in line for line in head), head
    table = machines.load(name)
    assert len(table) > 20
    for machine in table:
        assert machine.vcpus > 0 and machine.memory_gb > 0, machine
        assert bool(machine.accelerator) == bool(machine.accelerators), machine
        assert (machine.usd_per_hour is None) or (machine.price_date and machine.price_source), machine


def chosen(table: str, **resources) -> str:
    found = machines.choose(machines.load(table), Resources(**resources))
    assert isinstance(found, machines.Machine), found
    return found.name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("A100:8", "ml.p4d.24xlarge"),
        ("A100-80GB:8", "ml.p4de.24xlarge"),
        ("a100-80gb:8", "ml.p4de.24xlarge"),
        ("H100:1", "ml.p5.4xlarge"),
        ("H100:8", "ml.p5.48xlarge"),
        ("V100:8", "ml.p3.16xlarge"),
        ("V100-32GB:8", "ml.p3dn.24xlarge"),
        ("A10G", "ml.g5.xlarge"),
        ("L4:4", "ml.g6.12xlarge"),
        ("L40S:8", "ml.g6e.48xlarge"),
        ("T4", "ml.g4dn.xlarge"),
        ("B200:8", "ml.p6-b200.48xlarge"),
    ],
)
def test_accelerators_on_sagemaker(asked: str, name: str) -> None:
    assert chosen("sagemaker", accelerators=asked) == name


def test_cores_and_memory_are_at_least_what_was_asked() -> None:
    assert chosen("sagemaker") == "ml.m5.xlarge"
    assert chosen("sagemaker", accelerators="A10G", memory="60GB") == "ml.g5.4xlarge"
    assert chosen("sagemaker", accelerators="A10G", cpus=32) == "ml.g5.8xlarge"
    assert (
        machines.find_machine(machines.load("sagemaker"), chosen("sagemaker", cpus=90, memory="700GB")).memory_gb >= 700
    )


@pytest.mark.parametrize(
    ("resources", "path", "word"),
    [
        ({"accelerators": "A100:4"}, "resources.accelerators", "machines with 8: write A100:8 with num_nodes: 1"),
        ({"accelerators": "H100X:8"}, "resources.accelerators", "did you mean H100?"),
        ({"accelerators": "T4", "memory": "4TB"}, "resources.memory", "the largest"),
        ({"cpus": 5000}, "resources.cpus", "the largest"),
    ],
)
def test_what_no_machine_has(resources: dict, path: str, word: str) -> None:
    found = machines.choose(machines.load("sagemaker"), Resources(**resources))
    assert isinstance(found, Problem) and found.path == path and word in found.hint
