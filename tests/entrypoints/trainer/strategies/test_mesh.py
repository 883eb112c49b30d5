"""Layouts that are carried and those that are refused, never replaced."""

from __future__ import annotations

import pytest

from tests.entrypoints.training import ENTRYPOINTS

from trainer.strategies import mesh as plans  # isort: skip
from trainer.errors import Unsupported  # isort: skip

assert ENTRYPOINTS


@pytest.mark.parametrize(
    "parallelism, world, carrier, mesh",
    [
        ({}, 1, "accelerate", {}),
        ({}, 2, "accelerate", {"replicate": 2}),
        ({"strategy": "ddp"}, 1, "accelerate", {}),
        ({"strategy": "none", "tp_size": 2}, 2, "sharded", {"tensor": 2}),
        ({"strategy": "ddp", "tp_size": 1, "pp_size": 1, "cp_size": 1, "offload": False}, 2, "accelerate", {"replicate": 2}),
        ({"strategy": "fsdp"}, 4, "sharded", {"shard": 4}),
        ({"strategy": "fsdp", "dp_shard_size": 4}, 4, "sharded", {"shard": 4}),
        ({"strategy": "hsdp", "dp_replicate_size": 2}, 4, "sharded", {"replicate": 2, "shard": 2}),
        ({"strategy": "hsdp", "dp_shard_size": 4}, 8, "sharded", {"replicate": 2, "shard": 4}),
        ({"strategy": "zero2", "offload": True}, 2, "deepspeed", {"shard": 2}),
        ({"strategy": "ddp", "tp_size": 2}, 4, "sharded", {"replicate": 2, "tensor": 2}),
        ({"strategy": "fsdp", "tp_size": 2}, 4, "sharded", {"shard": 2, "tensor": 2}),
        ({"strategy": "fsdp", "pp_size": 2, "tp_size": 2}, 8, "pipeline", {"pipeline": 2, "shard": 2, "tensor": 2}),
        ({"strategy": "none", "cp_size": 2}, 2, "accelerate", {"context": 2}),
        ({"strategy": "ddp", "cp_size": 2}, 4, "accelerate", {"replicate": 2, "context": 2}),
        ({"strategy": "fsdp", "cp_size": 2}, 2, "sharded", {"context": 2}),
        ({"strategy": "fsdp", "cp_size": 2, "tp_size": 2}, 8, "sharded", {"shard": 2, "context": 2, "tensor": 2}),
    ],
)  # fmt: skip
def test_what_is_carried(parallelism: dict, world: int, carrier: str, mesh: dict):
    made = plans.choose_plan(parallelism, world)
    assert (made.carrier, made.mesh, made.world) == (carrier, mesh, world)


def test_neighbours_share_the_most():
    """Ranks of a tensor or pipeline group take the same samples, all others different ones."""
    made = plans.choose_plan({"strategy": "hsdp", "dp_replicate_size": 2, "tp_size": 2, "pp_size": 2}, 16)
    places = [(made.stage_rank(rank), made.data_rank(rank)) for rank in range(16)]
    assert places == [(stage, data) for stage in (0, 1) for data in range(4) for _ in range(2)]
    assert made.described == "hsdp (pipeline 2 x replicate 2 x shard 2 x tensor 2, 1f1b)"


def test_ranks_of_a_context_group_take_the_same_samples_and_other_parts():
    made = plans.choose_plan({"strategy": "fsdp", "cp_size": 2, "tp_size": 2}, 8)
    assert [(made.data_rank(rank), made.context_rank(rank)) for rank in range(8)] == [
        (data, part) for data in (0, 1) for part in (0, 1) for _ in range(2)
    ]
    assert (made.data_ranks, made.gradient_ranks, made.parts) == (2, 4, 4)
    assert made.described == "fsdp (shard 2 x context 2 x tensor 2)"
    made = plans.choose_plan({"strategy": "ddp", "cp_size": 2}, 4)
    assert (made.data_ranks, made.gradient_ranks, made.parts) == (2, 4, 1)
    assert [made.stage_rank(rank) for rank in range(4)] == [0] * 4


def test_hsdp_replicates_over_nodes_when_nothing_else_is_said():
    assert plans.choose_plan({"strategy": "hsdp"}, 8, nodes=2).mesh == {"replicate": 2, "shard": 4}


def test_a_schedule_follows_from_the_virtual_stages():
    made = plans.choose_plan({"strategy": "ddp", "pp_size": 2, "virtual_stages": 3}, 2)
    assert (made.schedule, made.stages) == ("interleaved", 6)
    made = plans.choose_plan({"strategy": "ddp", "pp_size": 2, "pp_schedule": "gpipe", "microbatches": 4}, 2)
    assert (made.schedule, made.stages, made.microbatches) == ("gpipe", 2, 4)


@pytest.mark.parametrize(
    "parallelism, world, sentence",
    [
        ({"strategy": "none"}, 2, "strategy none is for one process, the job has 2"),
        ({"strategy": "tensor"}, 2, "no strategy tensor; it has none, ddp, fsdp"),
        ({"strategy": "ddp", "cp_size": 2, "pp_size": 2}, 4, "cp_size 2 cannot be combined with pp_size"),
        ({"strategy": "ddp", "cp_size": 3}, 4, "cp_size 3 does not divide the 4 processes"),
        ({"strategy": "zero2", "cp_size": 2}, 4, "strategy zero2 cannot be combined with cp_size: use fsdp"),
        ({"strategy": "ddp", "offload": True}, 2, "strategy ddp has nothing to offload"),
        ({"strategy": "zero3", "tp_size": 2}, 4, "strategy zero3 cannot be combined with tp_size: use fsdp"),
        ({"strategy": "zero1", "pp_size": 2}, 4, "strategy zero1 cannot be combined with pp_size"),
        ({"strategy": "ddp", "tp_size": 2, "pp_size": 2}, 6, "tp_size 2 x pp_size 2 does not divide the 6 processes"),
        ({"strategy": "hsdp"}, 4, "hsdp needs at least 2 replicas of at least 2 shards"),
        ({"strategy": "hsdp", "dp_replicate_size": 3}, 4, "3 replicas of 1 shards do not make the 4"),
        ({"strategy": "fsdp", "dp_replicate_size": 2}, 4, "strategy fsdp has a dp_replicate_size of 1 here, not 2: write hsdp"),
        ({"strategy": "ddp", "dp_shard_size": 2}, 4, "strategy ddp has a dp_shard_size of 1 here, not 2"),
        ({"strategy": "ddp", "microbatches": 4}, 2, "parallelism.microbatches works with a pipeline only"),
        ({"strategy": "ddp", "pp_size": 2, "pp_schedule": "zb"}, 2, "no pp_schedule zb; there are 1f1b, gpipe, interleaved"),
        ({"strategy": "ddp", "pp_size": 2, "pp_schedule": "gpipe", "virtual_stages": 2}, 2, "interleaved only"),
    ],
)  # fmt: skip
def test_what_is_refused(parallelism: dict, world: int, sentence: str):
    with pytest.raises(Unsupported, match=sentence):
        plans.choose_plan(parallelism, world)
