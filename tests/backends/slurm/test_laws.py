"""The laws where Slurm could break them: the plan is what is sent, once, and secrets land nowhere."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cloudtrain.errors import BackendError
from cloudtrain.events import State
from cloudtrain.nodes.agents import LocalAgent
from tests.backends.slurm.test_ends import Cluster, cluster, final, job_of, said  # noqa: F401 - a fixture
from tests.conftest import wait_for


def test_the_plan_is_what_slurm_gets(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    seen = tmp_path / "seen"
    shim = tmp_path / "bin" / "sbatch"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/bash\nprintf "%s\\0" sbatch "$@" >{seen}\nexec /usr/bin/sbatch "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")  # a user's default, which must not win
    monkeypatch.setenv("PLANTED", "of-the-client")
    backend, plan, bundle = cluster.plan("import os; print(os.environ.get('PLANTED'))", num_nodes=2)
    handle = backend.submit(plan, bundle)
    cluster.handles.append((backend, handle))
    assert seen.read_text().split("\0")[:-1] == plan.request["sbatch"]
    held = tmp_path / "held.sh"
    cluster.slurm.ask("scontrol", "write", "batch_script", job_of(handle), str(held))
    assert held.read_text() == plan.request["script"], "slurmctld holds the script that the plan shows"
    assert final(backend, handle).state is State.SUCCEEDED
    assert said(backend, handle) == ["None", "None"], "the client's environment stays here"


def test_sent_once_whatever_dies(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    slurm = cluster.slurm
    backend, plan, bundle = cluster.plan("print('once')")
    ask = LocalAgent.ask

    def dies(self, operation, given=None, **arguments):
        if operation == "write" and str(arguments.get("path")).endswith("/job"):
            raise BackendError("the client died here")
        return ask(self, operation, given, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalAgent, "ask", dies)
        slurm.ask("scontrol", "update", "PartitionName=main", "State=DOWN")  # the job waits: it writes no number either
        with pytest.raises(BackendError, match="died here"):
            backend.submit(plan, bundle)
    handle = str(plan.request["folder"])
    cluster.handles.append((backend, handle))
    assert not Path(handle, "job").exists()
    assert cluster.backend().find(plan.attempt_id) == handle, "found by its name"
    assert cluster.backend().submit(plan, bundle) == handle
    assert len(slurm.ask("squeue", "-h", f"--name={plan.attempt_id}").splitlines()) == 1
    slurm.ask(*plan.request["sbatch"])  # and if it was sent twice after all
    slurm.ask("scontrol", "update", "PartitionName=main", "State=UP")
    ended = ["squeue", "-h", "-t", "all", f"--name={plan.attempt_id}", "-o", "%T"]
    wait_for(lambda: slurm.ask(*ended).split() == ["COMPLETED"] * 2, "the end of both")
    assert final(backend, handle).state is State.SUCCEEDED
    assert said(backend, handle) == ["once"]
    assert os.readlink(f"{handle}/owner") == job_of(handle), "whichever came first"


def test_secrets_come_from_a_file_and_land_nowhere(cluster: Cluster) -> None:  # noqa: F811
    secret = cluster.slurm.shared / "token-of-the-user"
    secret.touch(mode=0o600)
    secret.write_text("pl4nted-s3cret\n")
    script = (
        "import hashlib, os\n"
        "print(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest())\n"
        "print('it is', os.environ['TOKEN'])\n"
    )
    backend, handle = cluster.submit(script, num_nodes=2, secrets={"TOKEN": [f"file:{secret}"]})
    assert final(backend, handle).state is State.SUCCEEDED
    digest = hashlib.sha256(b"pl4nted-s3cret").hexdigest()
    assert sorted(said(backend, handle)) == sorted([digest, "it is ***"] * 2)
    token = Path(handle, "token")
    assert token.stat().st_mode & 0o777 == 0o600, "the nodes' own word is for the user's eyes"
    for path in [*cluster.slurm.shared.rglob("*"), *cluster.folder.rglob("*")]:
        if path.is_file() and path != secret:
            assert b"pl4nted" not in path.read_bytes(), path
    word = token.read_text().split('"')[3]
    for path in Path(handle).rglob("*"):
        if path.is_file() and path != token:
            assert word.encode() not in path.read_bytes(), path
