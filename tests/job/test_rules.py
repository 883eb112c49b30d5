"""Fields that are right by themselves and wrong together."""

from __future__ import annotations

import pytest

from cloudtrain.errors import BadJob
from cloudtrain.job.job import Job


def said(text: str) -> list[str]:
    try:
        Job.load(f"name: x\nentrypoint: t.py\n{text}")
    except BadJob as error:
        return [f"{problem.path}: {problem.message}" for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "text",
    [
        "num_nodes: 4\nmin_nodes: 4",
        "num_nodes: 2\nprocesses_per_node: 8\nparallelism: {tp_size: 4, pp_size: 2, cp_size: 2}",
        "num_nodes: 2\nprocesses_per_node: 8\nparallelism: {strategy: hsdp, dp_replicate_size: 2, dp_shard_size: 8}",
        "num_nodes: 2\nprocesses_per_node: 8\nparallelism: {tp_size: 2, dp_replicate_size: 4, dp_shard_size: 2}",
        "num_nodes: 8\nparallelism: {dp_shard_size: 4}",
        "resources: {accelerators: 'A100:8'}\nprocesses_per_node: 8",
        "resources: {accelerators: 'A100:8'}\nprocesses_per_node: 2",
        "processes_per_node: 4",
        "num_nodes: 2\nparallelism: {accelerate_config: a.yaml}",
        "num_nodes: 2\nparallelism: {strategy: none}",
        "env: {A: 1}\nsecrets: {B: 'env:A'}",
        "parallelism: {strategy: fsdp}",
        "num_nodes: 4\nparallelism: {strategy: hsdp, dp_shard_size: 2}",
        "num_nodes: 2\nprocesses_per_node: 2\nparallelism: {strategy: hsdp}",
        "num_nodes: 8\nparallelism: {strategy: fsdp, tp_size: 2, dp_shard_size: 4}",
        "num_nodes: 2\nhyperparameters: {deepspeed: ds.json}\nargs: [--fsdp, full_shard]",
        "num_nodes: 2\nparallelism: {strategy: fsdp}\nhyperparameters: {fsdp: '', deepspeed: null}\nargs: [--fsdp, '']",
    ],
)
def test_what_goes_together(text):
    assert said(text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("min_nodes: 2", "min_nodes: is 2, more than num_nodes, 1"),
        (
            "num_nodes: 3\nparallelism: {tp_size: 2}",
            "parallelism.tp_size: tp_size 2 does not divide the 3 processes of the job",
        ),
        (
            "num_nodes: 4\nparallelism: {pp_size: 4, cp_size: 2}",
            "parallelism.pp_size: pp_size 4 x cp_size 2 does not divide the 4 processes of the job",
        ),
        (
            "num_nodes: 8\nparallelism: {dp_replicate_size: 2, dp_shard_size: 2}",
            "parallelism.dp_replicate_size: makes 4 data-parallel ranks, but the job has 8 for them",
        ),
        (
            "num_nodes: 8\nparallelism: {dp_shard_size: 3}",
            "parallelism.dp_shard_size: makes 3 data-parallel ranks, but the job has 8 for them",
        ),
        (
            "num_nodes: 8\nparallelism: {tp_size: 4, dp_shard_size: 8}",
            "parallelism.dp_shard_size: makes 8 data-parallel ranks, but the job has 2 for them",
        ),
        (
            "resources: {accelerators: A100}\nprocesses_per_node: 2",
            "processes_per_node: is 2, but a node has 1 accelerators",
        ),
        (
            "parallelism: {strategy: fsdp, accelerate_config: a.yaml}",
            "parallelism.strategy: cannot be combined with parallelism.accelerate_config, whose file sets the strategy too",
        ),
        ("env: {A: 1}\nsecrets: {A: 'env:A'}", "secrets.A: is given in env and in secrets"),
        (
            "num_nodes: 4\nparallelism: {strategy: hsdp, dp_replicate_size: 4}",
            "parallelism.strategy: is hsdp, which needs two replicas of two shards at least: "
            "the job has 4 processes, and 4 replicas",
        ),
        (
            "processes_per_node: 4\nparallelism: {strategy: hsdp}",
            "parallelism.strategy: is hsdp, which needs two replicas of two shards at least: "
            "the job has 4 processes, and 1 replicas",
        ),
        (
            "num_nodes: 4\nparallelism: {strategy: zero2, dp_shard_size: 2}",
            "parallelism.dp_shard_size: makes 2 replicas, but strategy zero2 has no replicas",
        ),
        (
            "num_nodes: 2\nparallelism: {strategy: ddp}\nhyperparameters: {fsdp: full_shard}",
            "hyperparameters: fsdp conflicts with parallelism.strategy, which sets the same value",
        ),
        (
            "num_nodes: 2\nparallelism: {strategy: zero2}\nargs: [--lr, '1', --deepspeed=ds.json]",
            "args: --deepspeed conflicts with parallelism.strategy, which sets the same value",
        ),
        (
            "num_nodes: 2\nparallelism: {accelerate_config: a.yaml}\nargs: [--deepspeed, ds.json]",
            "args: --deepspeed conflicts with parallelism.accelerate_config, which sets the same value",
        ),
    ],
)
def test_what_does_not(text, expected):
    assert said(text) == [expected]


def test_a_field_that_is_wrong_by_itself_is_not_blamed_twice():
    assert said("num_nodes: x\nmin_nodes: 2") == ['num_nodes: must be a whole number, not the text "x"']
    assert said("env: {A: 1, RANK: 1}\nsecrets: {A: 'env:A'}\nmin_nodes: 5") == [
        "env.RANK: is set by cloudtrain on every rank",
        "min_nodes: is 5, more than num_nodes, 1",
    ]


def test_what_runs_once_per_node_has_no_strategy():
    with pytest.raises(BadJob) as refused:
        Job.load("name: x\nrun: torchrun t.py\nparallelism: {strategy: fsdp}")
    assert [problem.message for problem in refused.value.problems] == [
        "is fsdp, but a command (entrypoint as a list) starts its own processes"
    ]
