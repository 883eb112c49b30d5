"""A node's run directory as a client uses it: start the supervisor, and what a status of one or several nodes means.

    <node>/source/        the bundle, extracted; `.cloudtrain/launch.py` in it is the supervisor
    <node>/status.json    the supervisor's status, replaced atomically
    <node>/log            numbered lines: `<seq> <rank> <at> <text>`
    <node>/launcher.out   output of the supervisor itself (empty unless it crashed)
    <node>/started        created before the supervisor is started
    <node>/lock           held (flock) by the supervisor while it lives, so that it is never started twice
    <node>/cancel         a user asked to cancel
    <node>/cgroup         the control group of its processes, where one could be made

supervisor.py and agent.py work in the folder itself, on this or another machine; logs.py merges the logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BackendError, CloudtrainError, Unreachable, raise_first
from cloudtrain.events import ENDED, State, Status
from cloudtrain.nodes import supervisor

if TYPE_CHECKING:
    from cloudtrain.nodes.agents import Node

CUT_OFF_S = 15.0  # a node that lost contact with the others has ended itself after this time


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


def attempt_status(nodes: Sequence[Node], answers: Sequence[Any], lost_after_s: float) -> Status:
    """Return the status that the reports of an attempt's nodes give; raises the first error of a node that answered."""
    for answer in answers:
        if isinstance(answer, CloudtrainError) and not isinstance(answer, Unreachable):
            raise answer
    unreachable = [node for node, answer in zip(nodes, answers, strict=True) if isinstance(answer, Unreachable)]
    reports = [answer for answer in answers if isinstance(answer, dict)]
    if not reports:
        if min(node.agent.unreachable_s for node in unreachable) < lost_after_s:
            raise_first(answers)
        return Status(State.LOST, None, f"{unreachable[0].label} could not be reached for {lost_after_s:g} s")
    if all(answer["request"] is None for answer in reports):
        return Status(State.LOST, None, f"the attempt's folder {nodes[0].attempt} no longer exists")
    return merge_reports(answers, unreachable)


def merge_reports(answers: Sequence[Any], unreachable: Sequence[Node]) -> Status:
    """Merge the reports of an attempt's nodes, some of which are unreachable, into one Status.

    The supervisors watch each other, so the attempt runs as long as a reachable node runs. When all reachable nodes have
    ended, an unreachable one ends within CUT_OFF_S.
    """
    states = [answer["state"] for answer in answers if isinstance(answer, dict)]
    statuses: list[tuple[Mapping[str, Any] | None, Status | None]] = [
        (node_state["raw"] if node_state else None, to_status(node_state)) for node_state in states
    ]
    ended = [pair for pair in statuses if pair[1] is not None and pair[1].state.final]
    if ended and len(ended) + sum(status is None for _, status in statuses) == len(statuses):
        # A node that was never started shares the end of those that were waiting for it.
        if any(node.agent.unreachable_s < CUT_OFF_S for node in unreachable):
            return Status(State.STOPPING, reason=f"{unreachable[0].label} cannot be reached")
        merged = merge_statuses(ended)
        return replace(merged, event="") if unreachable else merged  # when those ended is not known
    status = merge_statuses(statuses)
    if unreachable and status.state in (State.QUEUED, State.STARTING):
        return Status(State.STARTING, reason=f"{unreachable[0].label} cannot be reached")
    return status


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
