"""The source on its way to three real hosts: the bytes that leave this machine."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.backends.ssh.test_backend import options
from tests.backends.ssh.test_faults import job_of, until_final
from tests.lab.connections import close_all
from tests.lab.network import Lab

SIZE = 8 << 20


@pytest.fixture(autouse=True)
def _connections(lab: Lab, census: Path):
    yield
    close_all()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").write_bytes(Random(8).randbytes(SIZE))
    (folder / "script.py").write_text("import os; print(os.path.getsize('weights'))")
    return folder


def bytes_sent(lab: Lab) -> int:
    """Return the bytes that this machine has sent into the lab's network."""
    return int(Path(f"/sys/class/net/ctlab{lab.number}/statistics/tx_bytes").read_text())


def test_three_hosts_get_one_upload_each(lab, source, tmp_path, home):
    backend = SshBackend(options(lab, 3), home / "runs")
    bundle = Bundle.make(source, tmp_path / "bundles")
    job = Job.from_dict(job_of(source, num_nodes=3))
    before = bytes_sent(lab)
    handle = backend.submit(backend.plan(job, bundle, "ship-1"), bundle)
    assert 3 * SIZE < bytes_sent(lab) - before < 3.5 * SIZE
    assert until_final(backend, handle).state is State.SUCCEEDED
    assert [line.text for line in backend.logs(handle) if line.rank >= 0] == [str(SIZE)] * 3
    assert len({host.path(f"/root/.cloudtrain/src/{bundle.sha256}.tar.gz").read_bytes() for host in lab.hosts}) == 1
