"""The machines of options.ssh.hosts as nodes of an attempt, and one status of what their supervisors report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State, Status
from cloudtrain.nodes import directory, ssh
from cloudtrain.nodes.rpc import Answer, RemoteAgent, read_each

if TYPE_CHECKING:
    from concurrent.futures import Future

CUT_OFF_S = 15.0  # a node that lost contact with the others has ended itself after this time


class Machine:
    """One machine of options.ssh.hosts; what it leaves out comes from the options for all machines."""

    def __init__(self, options: dict[str, Any], host_options: dict[str, Any]) -> None:
        def value(name: str) -> Any:
            return host_options.get(name) if host_options.get(name) is not None else options.get(name)

        self.host = ssh.Host(
            host_options["address"],
            value("port"),
            value("user"),
            value("jump"),
            value("identity"),
            value("known_hosts"),
        )
        self.label = self.host.label
        self.internal = str(host_options.get("internal") or host_options["address"])  # where the other nodes see it
        self.python = str(value("python") or "python3")
        self.setup = tuple(value("setup") or ())
        self.agent = RemoteAgent(self.host, self.python, self.setup)

    def to_dict(self) -> dict[str, Any]:
        fields = {
            name: getattr(self.host, name) for name in ("address", "port", "user", "jump", "identity", "known_hosts")
        }
        fields |= {"internal": self.internal, "python": self.python, "setup": list(self.setup)}
        return {name: value for name, value in fields.items() if value not in (None, [])}


class Node:
    """A machine as one node of an attempt."""

    def __init__(self, machine: Machine, rank: int, attempt: str) -> None:
        self.label, self.agent, self.rank, self.attempt = machine.label, machine.agent, rank, attempt
        self.folder = f"{attempt}/node-{rank}"
        self.ask = machine.agent.ask


def read_reports(nodes: Sequence[Node], future: Future[Answer]) -> list[Any]:
    """Return the report of each node, or the error instead."""
    try:
        return read_each(nodes[0].agent, future)
    except CloudtrainError as error:
        return [error] * len(nodes)


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
        return directory.merge_statuses(ended)
    status = directory.merge_statuses(statuses)
    if unreachable and status.state in (State.QUEUED, State.STARTING):
        return Status(State.STARTING, reason=f"{unreachable[0].label} cannot be reached")
    return status
