"""The fixtures `lab` and `slurm`, made once by each worker that needs them, gone when it ends; and `sdk`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require, wait_for
from tests.extent import tier_of
from tests.lab import sdk as sagemaker_sdk
from tests.lab.network import Lab
from tests.lab.slurm import Slurm


def need(*programs: str) -> None:
    """Skip where a program or root is missing; fail in CI, which names what it must have."""
    for program in programs:
        require(program)
    if os.geteuid() != 0:
        if programs[0] in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","):
            pytest.fail("hosts in network namespaces need root, and are required here")
        pytest.skip("hosts in network namespaces need root")


def hold(item: pytest.Item) -> None:
    """Fail a test of an earlier tier: which test asks for a lab at run time is written in tests/tiers.txt."""
    assert tier_of(item) == 3, f"{item.nodeid} uses hosts of the lab: name it with tier 3 in tests/tiers.txt"


@pytest.fixture(scope="session")
def _lab() -> Iterator[Lab]:
    need("sshd", "ip")
    made = Lab(hosts=3)
    yield made
    made.close()


@pytest.fixture
def lab(request: pytest.FixtureRequest, _lab: Lab) -> Iterator[Lab]:
    """Three hosts in their own network; mended after the test, and no process may be left on any of them."""
    hold(request.node)
    yield _lab
    _lab.mend()
    try:
        wait_for(lambda: not any(host.processes() for host in _lab.hosts), "the end of every process on the hosts")
        for host in _lab.hosts:
            host.clear()
    except AssertionError:
        left = {host.name: host.processes() for host in _lab.hosts}
        for host in _lab.hosts:
            host.reboot()  # the next test finds clean machines
        raise AssertionError(f"left behind: {left}") from None


@pytest.fixture(scope="session")
def _slurm() -> Iterator[Slurm]:
    need("sshd", "ip", "slurmctld", "munged")
    lab = Lab(hosts=3)
    yield Slurm(lab)
    lab.close()


@pytest.fixture
def slurm(request: pytest.FixtureRequest, _slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A Slurm with a login node and two compute nodes, in a lab of its own; this machine's commands ask it.

    After the test all jobs are ended and the nodes mended; a process that a finished job left behind fails the test.
    """
    hold(request.node)
    for name, value in _slurm.environ.items():
        monkeypatch.setenv(name, value)
    yield _slurm
    _slurm.mend()


@pytest.fixture
def accounted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """A Slurm of its own whose slurmdbd has limits of accounts and of qualities of service."""
    need("sshd", "ip", "slurmctld", "munged", "slurmdbd", "mariadbd")
    hold(request.node)
    lab = Lab(hosts=3)
    try:
        made = Slurm(lab, accounting=True)
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        yield made
    finally:
        lab.close()


@pytest.fixture(scope="session")
def sdk() -> Path:
    """The interpreter of an environment with sagemaker<3."""
    return sagemaker_sdk.interpreter()
