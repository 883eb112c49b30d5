"""A launcher in a command that expects other nodes than the job has."""

from __future__ import annotations

import pytest

from cloudtrain.job.launchers import gpus_note, nodes_note


@pytest.mark.parametrize(
    ("command", "nodes", "part"),
    [
        ("torchrun --nnodes 4 train.py", 2, "--nnodes 4 waits for other nodes than num_nodes, 2"),
        ("torchrun --nnodes=4 train.py", 1, "--nnodes 4 waits"),
        ("python -m torch.distributed.run --nnodes 4 train.py", 2, "torch.distributed.run --nnodes 4 waits"),
        ("torchrun --nnodes 1:2 train.py", 4, "--nnodes 1:2 waits"),
        ("cd x && torchrun \\\n  --nnodes 4 train.py", 2, "--nnodes 4 waits"),
        ("torchrun train.py", 2, "each of the 2 nodes trains by itself"),
        ("accelerate launch --num_machines 4 train.py", 2, "--num_machines 4 waits"),
        ("accelerate launch --num-machines 4 train.py", 2, "--num_machines 4 waits"),
    ],
)
def test_other_nodes(command: str, nodes: int, part: str):
    assert part in nodes_note(command, nodes, is_text=True)


@pytest.mark.parametrize(
    ("command", "nodes"),
    [
        ("torchrun --nnodes 2 train.py", 2),
        ("torchrun --nnodes 1:4 train.py", 2),
        ("torchrun --nnodes $CLOUDTRAIN_NUM_NODES train.py", 2),
        ("torchrun --nproc-per-node 8 train.py", 1),
        ("accelerate launch --config_file fsdp.yaml train.py", 2),
        ("python train.py --launcher torchrun-like", 2),
        ("pip install torchrun-x; python train.py", 2),
    ],
)
def test_the_same_nodes(command: str, nodes: int):
    assert nodes_note(command, nodes, is_text=True) == nodes_note(command, nodes, is_text=False) == ""


def test_a_variable_is_advised_only_where_a_shell_replaces_it():
    command = "torchrun --nnodes 2 train.py"
    assert "write --nnodes $CLOUDTRAIN_NUM_NODES" in nodes_note(command, 1, is_text=True)
    words = nodes_note(command, 1, is_text=False)
    assert "name the script alone with --nodes 2" in words and "$" not in words


@pytest.mark.parametrize(
    ("command", "gpus", "nodes", "part"),
    [
        ("torchrun --nproc_per_node 4 train.py", 8, 1, "uses 4 of the 8 GPUs of a node, and 4 paid GPUs are idle"),
        ("torchrun --nproc-per-node=4 train.py", 8, 1, "write --nproc_per_node 8"),
        ("torchrun train.py", 2, 1, "without --nproc_per_node uses 1 of the 2 GPUs"),
        ("accelerate launch --num_processes 8 train.py", 8, 2, "write --num_processes 16"),
    ],
)
def test_gpus_that_no_process_uses_are_named(command: str, gpus: int, nodes: int, part: str):
    assert part in gpus_note(command, gpus, nodes)


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("torchrun --nproc_per_node 8 train.py", 8),
        ("torchrun --nproc_per_node gpu train.py", 8),
        ("torchrun --nproc_per_node $GPUS train.py", 8),
        ("torchrun --nproc_per_node 2 train.py", 0),
        ("accelerate launch train.py", 8),
        ("python train.py", 8),
    ],
)
def test_no_note_where_all_gpus_are_used_or_nothing_is_known(command: str, gpus: int):
    assert gpus_note(command, gpus, 1) == ""
