"""The status of attempts on SSH machines, from what the supervisors of their nodes report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from cloudtrain.backends.ssh.machines import Node, raise_first
from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.nodes import directory
from cloudtrain.nodes.rpc import begin_each, read_each
from cloudtrain.nodes.ssh import call_all

CUT_OFF_S = 15.0  # a node that lost contact with the others has ended itself after this time
LATE_S = 2.0  # how long a machine may answer after the first one, where several are asked at once


def ask_reports(attempt: Sequence[Node], *, lease: bool) -> list[Any]:
    """Return the report of each node of an attempt, or the error instead; renews the client's lease on the way."""
    return call_all(lambda node: node.ask("report", folder=node.attempt, rank=node.rank, lease=lease).value, attempt)


def collect_reports(attempts: Sequence[Sequence[Node]], *, lease: bool) -> dict[Node, Any]:
    """Return the reports of several attempts, or the errors instead, from one request to each machine.

    Left out are machines that answer LATE_S after the first one.
    """
    from concurrent.futures import FIRST_COMPLETED, wait

    by_machine: dict[str, list[Node]] = {}
    for node in chain.from_iterable(attempts):
        by_machine.setdefault(node.label, []).append(node)
    futures = [
        (
            nodes,
            begin_each(
                nodes[0].agent, "report", [{"folder": n.attempt, "rank": n.rank, "lease": lease} for n in nodes]
            ),
        )
        for nodes in by_machine.values()
    ]
    wait([future for _, future in futures], return_when=FIRST_COMPLETED)
    wait([future for _, future in futures], timeout=LATE_S)
    reports: dict[Node, Any] = {}
    for nodes, future in futures:
        if future.done():
            try:
                answers: list[Any] = read_each(nodes[0].agent, future)
            except CloudtrainError as error:
                answers = [error] * len(nodes)
            reports.update(zip(nodes, answers, strict=True))
    return reports


def attempt_status(attempt: Sequence[Node], answers: Sequence[Any], lost_after_s: float) -> Status:
    """Return the status that the nodes' reports give; raises the first error of a node that answered."""
    for answer in answers:
        if isinstance(answer, CloudtrainError) and not isinstance(answer, Unreachable):
            raise answer
    unreachable = [node for node, answer in zip(attempt, answers, strict=True) if isinstance(answer, Unreachable)]
    reports = [answer for answer in answers if isinstance(answer, dict)]
    if not reports:
        if min(node.agent.remote.unreachable_s for node in unreachable) < lost_after_s:
            raise_first(answers)
        return Status(State.LOST, None, f"{unreachable[0].label} could not be reached for {lost_after_s:g} s")
    if all(answer["request"] is None for answer in reports):
        return Status(
            State.LOST,
            None,
            f"the folder of the attempt does not exist: {attempt[0].attempt} (never started, or deleted)",
        )
    return merge_reports(attempt, answers, unreachable)


def merge_reports(attempt: Sequence[Node], answers: Sequence[Any], unreachable: Sequence[Node]) -> Status:
    """Merge the reports of an attempt's nodes, some of which are unreachable, into one Status.

    The supervisors watch each other, so the attempt runs as long as a reachable node runs. When all reachable nodes have
    ended, an unreachable one ends within CUT_OFF_S.
    """
    reports = [(rank, answer["state"]) for rank, answer in enumerate(answers) if isinstance(answer, dict)]
    statuses: list[tuple[Mapping[str, Any] | None, Status | None]] = [
        (node_state["raw"] if node_state else None, directory.to_status(node_state)) for _, node_state in reports
    ]
    ended = [pair for pair in statuses if pair[1] is not None and pair[1].state.final]
    if ended and len(ended) + sum(status is None for _, status in statuses) == len(statuses):
        # A node that was never started shares the end of those that were waiting for it.
        if any(node.agent.remote.unreachable_s < CUT_OFF_S for node in unreachable):
            return Status(State.STOPPING, reason=f"{unreachable[0].label} cannot be reached")
        merged = directory.merge_statuses(ended)
        return replace(merged, event="") if unreachable else merged  # when those ended is not known
    status = directory.merge_statuses(statuses)
    if unreachable and status.state in (State.QUEUED, State.STARTING):
        return Status(State.STARTING, reason=f"{unreachable[0].label} cannot be reached")
    return status
