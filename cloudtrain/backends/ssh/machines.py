"""The machines of options.ssh.hosts, and the nodes of an attempt on them as its handle names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.nodes import ssh
from cloudtrain.nodes.rpc import RemoteAgent

_HANDLE = re.compile(r"(?>(?P<labels>.+?):(?=[~/]))(?P<folder>.*/runs/(?P<run>[^/]+)/a(?P<attempt>\d+))")


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
        self.courier = RemoteAgent(self.host, self.python, self.setup, "bundles")

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


def attempt_nodes(machines: Sequence[Machine], handle: str) -> list[Node] | None:
    """Return an attempt's nodes, or None if the handle is invalid or names other machines."""
    match = _HANDLE.fullmatch(handle)
    by_label = {machine.label: machine for machine in machines}
    labels = match["labels"].split(",") if match else []
    if not match or not all(label in by_label for label in labels):
        return None
    return [Node(by_label[label], rank, match["folder"]) for rank, label in enumerate(labels)]


def make_handle(labels: Sequence[str], folder: str) -> str:
    """Return the handle of an attempt in a folder on machines with these labels, by node rank."""
    return f"{','.join(labels)}:{folder}"


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first error among answers: refusals before unreachable machines."""
    errors = [answer for answer in answers if isinstance(answer, CloudtrainError)]
    for error in sorted(errors, key=lambda error: isinstance(error, Unreachable)):
        raise error
