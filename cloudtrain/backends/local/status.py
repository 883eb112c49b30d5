"""The status of an attempt on this machine, from the files of its nodes' supervisors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cloudtrain.nodes.directory as directory
import cloudtrain.nodes.supervisor as supervisor
from cloudtrain.events import State, Status


def read_attempt(folder: Path, nodes: Sequence[Path]) -> Status:
    """Return the status of the attempt with this folder, and these folders of its nodes."""
    if not nodes:
        return Status(State.LOST, None, f"the attempt's folder {folder} no longer exists")
    return directory.merge_statuses([(supervisor.read_status(node), _node_status(node, nodes[0])) for node in nodes])


def _node_status(node: Path, first: Path) -> Status | None:
    """Return a node's status; a node that was never started has the final status of node 0, for which it waited."""
    status = directory.node_status(node)
    if status is None and node != first:
        leader = directory.node_status(first)
        if leader is not None and leader.state.final:
            return leader
    return status
