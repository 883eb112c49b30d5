"""The machines of options.ssh.hosts, and the nodes of an attempt on them as its handle names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from cloudtrain.errors import CloudtrainError
from cloudtrain.nodes import ssh, ssh_config
from cloudtrain.nodes.agents import Node
from cloudtrain.nodes.rpc import RemoteAgent, begin_each, read_each

LATE_S = 2.0  # how long a machine may answer after the first one, where several are asked at once
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
        self._internal = str(host_options.get("internal") or "")
        self.python = str(value("python") or "python3")
        self.setup = tuple(value("setup") or ())
        self.agent = RemoteAgent(self.host, self.python, self.setup)

    @cached_property
    def internal(self) -> str:
        """The address by which the other nodes see it: by default what ~/.ssh/config has for `address`; blocking.

        The other machines have no such configuration. A plan has `address` as the default, and is not resolved before it is
        sent. Raises BackendError where ssh does not understand its configuration.
        """
        host = self.host
        if self._internal not in ("", host.address):
            return self._internal
        config = ssh_config.read(host.address, host.port, host.user, host.known_hosts)
        return config.hostname if config else host.address

    def to_dict(self) -> dict[str, Any]:
        fields = {
            name: getattr(self.host, name) for name in ("address", "port", "user", "jump", "identity", "known_hosts")
        }
        fields |= {"internal": self._internal or self.host.address, "python": self.python, "setup": list(self.setup)}
        return {name: value for name, value in fields.items() if value not in (None, [])}


def attempt_nodes(machines: Sequence[Machine], handle: str) -> list[Node]:
    """Return an attempt's nodes, none if the handle is invalid or names other machines."""
    match = _HANDLE.fullmatch(handle)
    by_label = {machine.label: machine for machine in machines}
    labels = match["labels"].split(",") if match else []
    if not match or not all(label in by_label for label in labels):
        return []
    return [Node(by_label[label].agent, rank, match["folder"]) for rank, label in enumerate(labels)]


def make_handle(labels: Sequence[str], folder: str) -> str:
    """Return the handle of an attempt in a folder on machines with these labels, by node rank."""
    return f"{','.join(labels)}:{folder}"


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
