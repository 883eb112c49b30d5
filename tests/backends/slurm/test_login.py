"""Slurm through a login node over SSH, and where the options of a target may be wrong (doctor)."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import pytest

from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.errors import NotReached
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import Submitter
from cloudtrain.source.bundle import Bundle
from tests.backends.slurm.test_ends import PATIENT
from tests.conftest import WAIT_S, wait_for
from tests.lab.connections import close_all
from tests.lab.network import Lab
from tests.lab.slurm import Slurm

SCRIPT = """
import os, pathlib
run = __import__("cloudtrain_runtime").context()
for rank in range(3):
    print("rank", run.rank, "of", run.world_size, "line", rank, flush=True)
pathlib.Path(run.model_dir, f"weights-{run.rank}").write_bytes(os.urandom(5_000_000))
print("args", __import__("sys").argv[1:], flush=True)
"""


@pytest.fixture
def login(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The login node as options, and a machine here that knows nothing of Slurm."""
    pytest.importorskip("asyncssh")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    lab = slurm.lab
    yield {
        "address": slurm.login.address,
        "user": "root",
        "identity": str(lab.key),
        "known_hosts": str(lab.known_hosts),
    }
    close_all()


@pytest.mark.parametrize(
    ("address", "said"), [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "no address was found")]
)
def test_a_login_node_without_a_service_fails_the_run_at_once(address: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("asyncssh")
    (tmp_path / "train.py").write_text("print('trained')\n")
    with socket.socket() as holder:  # nothing listens on its port, and nothing else can
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        login = {"address": address, "port": port, "user": "root"}
        job = {"name": "far", "source": str(tmp_path), "entrypoint": "train.py", "target": "slurm"}
        submitter = Submitter(watch=False)
        with pytest.raises(NotReached, match=f"the login node cannot be reached: .*{said}"):
            submitter.submit({**job, "options": {"slurm": {"login": login, "folder": "/shared/cloudtrain"}}})
    (run,) = submitter.store.runs()
    assert run.status.state is State.FAILED and said in run.status.reason
    close_all()


def test_a_squeue_that_hangs_holds_up_no_line(lab: Lab, tmp_path: Path) -> None:
    pytest.importorskip("asyncssh")
    attempt, gate = lab.shared / "a1", lab.shared / "gate"
    (attempt / "node-0").mkdir(parents=True)
    (attempt / "nodes").write_text("1")
    (attempt / "node-0" / "log").write_text("1 0 2026-11-23T16:00:00.000000Z a line\n")
    keys = {"identity": str(lab.key), "known_hosts": str(lab.known_hosts)}
    login = {"address": lab.hosts[0].address, "user": "root", **keys}
    backend = SlurmBackend({"folder": str(lab.shared), "python": sys.executable, "login": login}, tmp_path)
    ended: list[int] = []
    squeue = ["sh", "-c", f"touch {gate}.hangs; until [ -e {gate} ]; do sleep 0.1; done"]
    thread = threading.Thread(target=lambda: ended.append(backend._run(squeue)["code"]))
    thread.start()
    try:
        wait_for(Path(f"{gate}.hangs").exists, "the command that hangs")
        assert len(list(backend.logs(str(attempt)))) == 1 and not ended
    finally:
        gate.touch()
        thread.join(WAIT_S)
        close_all()
    assert ended == [0]


def planned(backend: SlurmBackend, folder: Path, script: str, **job):
    source = folder / f"source-{job.get('name', 'login')}"
    source.mkdir()
    (source / "script.py").write_text(script)
    bundle = Bundle.make(source, folder / "bundles")
    made = Job.from_dict({"name": "login", "source": str(source), "entrypoint": "script.py", **job})
    return backend.plan(made, bundle, f"{made.name}-{folder.name}"), bundle


def test_a_job_through_the_login_node(
    slurm: Slurm, login: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # git packages
    options = {"folder": str(slurm.shared), "python": sys.executable, "login": login}
    SlurmBackend.options().model_validate(options)

    def connect() -> SlurmBackend:
        return SlurmBackend(options, tmp_path / "work")

    assert connect().check() == []
    hostile = ["a b", "$HOME `id` 'q' \"d\"", "line\nbreak", "漢字", ""]
    plan, bundle = planned(connect(), tmp_path, SCRIPT, num_nodes=2, args=hostile)
    assert connect().find(plan.attempt_id) is None
    handle = connect().submit(plan, bundle)
    assert connect().submit(plan, bundle) == handle == connect().find(plan.attempt_id)
    lines = list(connect().logs(handle, follow=True))
    status = connect().status(handle)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0)
    said = [(line.node, line.text) for line in lines if line.rank >= 0]
    for node in (0, 1):
        assert [text for at, text in said if at == node] == [
            *(f"rank {node} of 2 line {number}" for number in range(3)), f"args {hostile}"]  # fmt: skip
    middle = lines[len(lines) // 2]
    assert list(connect().logs(handle, after=middle.cursor)) == lines[len(lines) // 2 + 1 :]
    into = connect().fetch(handle, tmp_path / "fetched")
    for rank in (0, 1):
        weights = Path(plan.request["run_dir"], "model", f"weights-{rank}")
        assert (into / "model" / weights.name).read_bytes() == weights.read_bytes()

    plan, bundle = planned(connect(), tmp_path, PATIENT, name="endless", num_nodes=2, args=["9"])
    handle = connect().submit(plan, bundle)
    wait_for(lambda: sum("start 1" in line.text for line in connect().logs(handle)) == 2, "both ranks")
    assert connect().status(handle).state is State.RUNNING
    connect().cancel(handle)
    wait_for(lambda: connect().status(handle).state is State.CANCELLED, "the cancel")
    kept = slurm.shared / "src" / f"{bundle.sha256}.tar.gz"
    before = kept.stat()
    job = Job.from_dict({**plan.job, "args": ["1"]})
    handle = connect().submit(connect().plan(job, bundle, f"again-{tmp_path.name}"), bundle)
    wait_for(lambda: connect().status(handle).state is State.SUCCEEDED, "the second")
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "sent once"


def test_doctor_names_what_is_wrong(slurm: Slurm, tmp_path: Path) -> None:
    def problems(**options) -> list[str]:
        given = {"folder": str(slurm.shared), "python": sys.executable, **options}
        return [f"{problem.path}: {problem.message}" for problem in SlurmBackend(given, tmp_path).check()]

    assert problems() == []
    (found,) = problems(partition="nowhere")
    assert found == "options.slurm: Slurm refuses the job: allocation failure: Invalid partition name specified"
    private = tmp_path / "private"  # the nodes have another /tmp
    private.mkdir()
    (found,) = problems(folder=str(private))
    assert found.startswith(f"options.slurm.folder: a node cannot see {private}")
    assert SlurmBackend({}, tmp_path).check()[0].path == "options.slurm.folder"
    found = SlurmBackend.discover()
    assert found["partition"] == "main" and found["folder"].startswith("/")
