"""Checkpoints of a model in parts where nodes share no folder: each node's disk has the parts of its ranks.

Rank 0 commits for all: its COMPLETE names every file, those of other nodes with their node. The launchers bring each
node's files to the output, COMPLETE when all are there (output/sync.py), and before a start all files to every node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import collectives
from ..errors import Unsupported
from . import files

ABSENT = "some shards are missing on this node"


def is_shared(folder: Path, stored: bool) -> bool:
    """Return whether all ranks see what rank 0 writes into the folder; collective.

    Raises Unsupported where they do not, unless every node's folder is `stored` in the output.
    """
    mark = folder / collectives.from_rank_0(lambda: f".seen-{os.urandom(8).hex()}")  # another start has its own
    collectives.from_rank_0(mark.touch)
    blind = [rank for rank, sees in enumerate(collectives.every_rank(mark.exists())) if not sees]
    collectives.from_rank_0(lambda: mark.unlink(missing_ok=True))
    if blind and not collectives.from_rank_0(lambda: stored):
        raise Unsupported(
            f"rank {blind[0]} does not see rank 0's checkpoints in {folder}: a sharded model needs a folder that all nodes "
            "share, an output in an object store, or strategy ddp"
        )
    return not blind


def leads() -> bool:
    """Return whether this rank is the first of its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def follows() -> bool:
    """Return whether this rank is the first of a node whose disk is not rank 0's."""
    return leads() and collectives.rank() > 0


def index(path: Path, group: Any) -> bytes | None:
    """Return rank 0's index of the parts, which each node reads before its own; None for DeepSpeed. Collective."""
    file = path / "state" / ".metadata"
    return collectives.from_rank_0(lambda: file.read_bytes() if file.exists() else None, group)


def settle(path: Path, index: bytes | None) -> dict[str, dict[str, Any]]:
    """Put this node's files on its disk, the index beside them, and return their sizes and hashes."""
    if index is not None:
        (path / "state" / ".metadata").write_bytes(index)
    return files.settle(path)


def elsewhere(own: dict[str, dict[str, Any]], group: Any) -> dict[str, dict[str, Any]]:
    """Return the files on other nodes' disks than rank 0's, each with its node; collective."""
    nodes = [found for found in collectives.every_rank(own, group) if found]
    return {name: {**at, "node": node} for node, found in enumerate(nodes, 1) for name, at in found.items()}


def damage(path: Path, kind: str) -> str | None:
    """Return why rank 0's checkpoint cannot be loaded by the start that wrote it, or resumed from it; None if it can."""
    if kind == "deepspeed" and not files.has_all_files(path) and files.has_all_files(path, written=True):
        return "its shards are on several nodes"  # DeepSpeed reads files of the first rank on each
    own = files.has_all_files(path, written=True) and not files.has_all_files(path)
    return None if own else files.damage(path)


def on_every_disk(folder: Path) -> set[str]:
    """Return the names of the checkpoints that every node's disk has whole; collective."""
    whole = None
    if leads():
        found = [each.path for each in files.find(folder)]
        # Rank 0 reads what it chooses later.
        stands = [p for p in found if (files.damage(p) is None if follows() else files.has_all_files(p))]
        whole = {path.name for path in stands}
    return set.intersection(*(names for names in collectives.every_rank(whole) if names is not None))


def remove_all_but(folder: Path, kept: list[str], epoch: int) -> None:
    """Remove the checkpoints from this node's disk that rank 0 has removed from its own."""
    for checkpoint in files.find(folder):
        if checkpoint.path.name not in kept and checkpoint.attempt <= epoch:
            files.discard(checkpoint.path)
