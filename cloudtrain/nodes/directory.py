"""A node's run directory as a client uses it: start the supervisor, and what a status of one or several nodes means.

    <node>/source/        the bundle, extracted; `.cloudtrain/launch.py` in it is the supervisor
    <node>/status.json    the supervisor's status, replaced atomically
    <node>/log            numbered lines: `<seq> <rank> <at> <text>`
    <node>/launcher.out   output of the supervisor itself (empty unless it crashed)
    <node>/started        created before the supervisor is started
    <node>/lock           held (flock) by the supervisor while it lives, so that it is never started twice
    <node>/cancel         a user asked to cancel
    <node>/cgroup         the control group of its processes, where one could be made

Shared by local, ssh and slurm. supervisor.py and agent.py work in the folder itself, on this or another machine; logs.py
merges the logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.errors import BackendError
from cloudtrain.events import ENDED, State, Status
from cloudtrain.nodes import supervisor


def start(node: Path, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> bool:
    """Start a node's supervisor, detached from this process and its terminal; return False if it runs or ran already.

    `secrets` is passed on standard input. Raises BackendError.
    """
    try:
        return supervisor.start(node, argv, env, secrets)
    except OSError as error:
        raise BackendError(f"the supervisor of {node} cannot be started: {error.strerror or error}") from None


def node_status(node: Path) -> Status | None:
    """Return a node's status, LOST if its supervisor died without a final status; None if it was never started."""
    return to_status(supervisor.read_state(node))


def to_status(node_state: Mapping[str, Any] | None) -> Status | None:
    """Convert a state from `read_state` into a Status."""
    if node_state is None:
        return None
    reported = node_state["state"] == "LOST" and (node_state["raw"] or {}).get("state") == "LOST"
    return Status(
        State[node_state["state"]],
        node_state["exit_code"],
        node_state["reason"],
        node_state["started_at"],
        node_state["ended_at"],
        event=ENDED if reported else "",
    )


def merge_statuses(statuses: Sequence[tuple[Mapping[str, Any] | None, Status | None]]) -> Status:
    """Merge the (status.json, Status) pairs of an attempt's nodes into one Status; it is final when all nodes are."""
    begun = [(raw or {}, status) for raw, status in statuses if status is not None]
    if not begun:
        return Status(State.QUEUED)
    started = min((status.started_at for _, status in begun if status.started_at), default=None)
    live = [status for _, status in begun if not status.state.final]
    if live or len(begun) < len(statuses):
        queued = next((status for status in live if status.state is State.QUEUED), None)
        if queued is not None and len(live) == len(begun):  # one node waits for GPUs, so that none trains
            return queued
        stages = {status.state for _, status in begun}
        ending = any(status.state.final and status.state is not State.SUCCEEDED for _, status in begun)
        running = State.RUNNING if State.RUNNING in stages and not ending else State.STARTING
        return Status(State.STOPPING if ending or State.STOPPING in stages else running, started_at=started)
    ended = max((status.ended_at for _, status in begun if status.ended_at), default=None)
    # The first failure by time is the cause; the failures of the other nodes follow from it.
    _, worst = min(begun, key=lambda pair: (_SEVERITY[pair[1].state], pair[0].get("failed_at") or "~"))
    known = all(status.ended_at and (status.event or status.state is not State.LOST) for _, status in begun)
    event = ENDED if known and worst.state is State.LOST else ""
    return Status(worst.state, worst.exit_code, worst.reason, started, ended, event=event)


_SEVERITY = {
    State.CANCELLED: 0,
    State.FAILED: 1,
    State.TIMED_OUT: 2,
    State.PREEMPTED: 3,
    State.LOST: 4,
    State.SUCCEEDED: 9,
}
