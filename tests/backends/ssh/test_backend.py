"""The ssh backend on real machines of a lab (network, PIDs and disk of their own): the contract suite on two of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.nodes.rpc import RemoteAgent
from cloudtrain.testing.contract import BackendContract
from tests.lab.connections import close_all
from tests.lab.network import Lab


def options(lab: Lab, hosts: int = 2, **more) -> dict:
    access = {"user": "root", "identity": str(lab.key), "known_hosts": str(lab.known_hosts), "python": sys.executable}
    return {"hosts": [{"address": host.address} for host in lab.hosts[:hosts]], **access, **more}


def left_on(lab: Lab) -> list[str]:
    """Return the processes on all hosts, our own agents excepted: they end with their connection."""
    return [
        f"{host.name}: {line}"
        for host in lab.hosts
        if host.on
        for line in host.processes().values()
        if "exec(sys.stdin.buffer" not in line
    ]


@pytest.fixture(autouse=True)
def _connections(lab: Lab):
    yield
    close_all()


def count_requests(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the requests that are sent to machines; return the function that tells the count."""
    sent, begin = [], RemoteAgent.begin

    def counted(self: RemoteAgent, *arguments: Any, **named: Any) -> Any:
        sent.append(self.label)
        return begin(self, *arguments, **named)

    monkeypatch.setattr(RemoteAgent, "begin", counted)
    return lambda: len(sent)


class TestSsh(BackendContract):
    @pytest.fixture
    def connect(self, lab: Lab, home: Path, monkeypatch: pytest.MonkeyPatch):
        self.lab = lab
        self.calls = count_requests(monkeypatch)
        return lambda: SshBackend(options(lab), home / "runs")

    def leftovers(self, handle: str) -> list[str]:
        return left_on(self.lab)
