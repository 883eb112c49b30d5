"""Many attempts from one squeue of a real Slurm, and Slurm's reason of a job that waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cloudtrain.backends.slurm import client, status
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.cli import main
from cloudtrain.errors import Unreachable
from cloudtrain.events import ENDED, State
from cloudtrain.job.job import Job
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.source.bundle import Bundle
from tests.backends.slurm.test_backend import count_calls
from tests.conftest import wait_for
from tests.lab.slurm import Slurm

MANY = 50
HELD = (
    "Slurm: JobHeldUser: it will not start by itself: its owner put it on hold: `scontrol release JOB` lets it start; "
    "to give up, run `cloudtrain cancel`"
)


@pytest.fixture
def backend(slurm: Slurm, tmp_path: Path) -> SlurmBackend:
    return SlurmBackend({"folder": str(slurm.shared), "python": sys.executable, "directives": ["--hold"]}, tmp_path)


@pytest.fixture
def handles(backend: SlurmBackend, tmp_path: Path) -> list[str]:
    """Attempts that Slurm holds in its queue."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "script.py").write_text("print(1)")
    bundle = Bundle.make(tmp_path / "source", tmp_path / "bundles")
    job = Job.from_dict({"name": "many", "source": str(tmp_path / "source"), "entrypoint": "script.py"})
    return [backend.submit(backend.plan(job, bundle, f"many-{tmp_path.name}-{n}"), bundle) for n in range(MANY)]


def test_many_attempts_are_one_squeue(slurm: Slurm, backend: SlurmBackend, handles: list[str], tmp_path, monkeypatch):
    jobs = [Path(handle, "job").read_text() for handle in handles]
    missing = str(Path(handles[0]).parent / "a9")
    slurm.ask("scancel", jobs[1], jobs[2])
    slurm.ask("scontrol", "release", *jobs[3:5])
    for handle in handles[3:5]:
        wait_for(lambda handle=handle: backend.status(handle).state is State.SUCCEEDED)
    with monkeypatch.context() as patch:
        calls = count_calls(tmp_path / "counted", patch)
        found = backend.statuses([*handles, missing])
        assert calls() == 1
    assert missing not in found
    assert found == {handle: backend.status(handle) for handle in handles}, "also where a job has stored no file"
    assert [found[handle].state for handle in handles[:6]] == [State.QUEUED, State.CANCELLED, State.CANCELLED,
                                                              State.SUCCEEDED, State.SUCCEEDED, State.QUEUED]  # fmt: skip
    assert {found[handle].reason for handle in handles[5:]} == {HELD}


def test_what_slurm_has_forgotten_is_left_out(backend: SlurmBackend, handles: list[str]):
    Path(handles[1], "job").write_text("4194303")
    assert set(backend.statuses(handles[:3])) == {handles[0], handles[2]}
    assert backend.statuses(handles[1:2]) == {}, "squeue fails for one number that it does not know"


def test_a_controller_that_does_not_answer_is_no_answer(
    backend: SlurmBackend, handles: list[str], tmp_path, monkeypatch
):
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(Unreachable, match="Slurm did not answer"):
        backend.statuses(handles[:2])


def test_a_site_without_squeue_leaves_all_to_status():
    denied = {"code": 1, "out": "", "err": "squeue: error: Access/permission denied"}
    assert client.query_jobs(lambda argv: denied, ["1", "2"]) == {}


def test_a_reason_that_changes_is_an_event_of_the_run(slurm: Slurm, home: Path, tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "script.py").write_text("print(1)")
    submitter = Submitter("slurm", watch=False, folder=str(slurm.shared), python=sys.executable, directives=["--hold"])
    run = submitter.submit({"source": str(tmp_path / "source"), "entrypoint": "script.py"})
    number = Path(str(run.attempts[-1].handle), "job").read_text()

    def reason() -> str:
        status = Watcher(run.store, run.run_id).refresh()
        assert status is not None and status.state is State.QUEUED
        return run.record.status.reason

    assert reason() == HELD
    slurm.ask("scontrol", "update", f"job={number}", "dependency=afterok:999999", "starttime=now+1hour")
    slurm.ask("scontrol", "release", number)
    wait_for(lambda: reason() not in ("", HELD))
    events = [event.data["reason"] for event in run.store.events(run.run_id, "status")]
    assert events[0] == HELD and events[-1] == run.record.status.reason
    assert events[-1].startswith(("Slurm: BeginTime: it starts at", "Slurm: Dependency: it starts when")), events
    run.cancel()


def test_a_job_beyond_the_limit_of_its_partition(slurm: Slurm, home: Path, tmp_path: Path, monkeypatch, capsys):
    """The run says why it waits. doctor notes the partitions' limits and probes with the job's own; plan knows them then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print(1)")
    (tmp_path / "job.yaml").write_text("name: long\nentrypoint: script.py\nlimits: {max_runtime: 2h}\n")
    options = {"backend": "slurm", "folder": str(slurm.shared), "python": sys.executable, "partition": "high"}
    rows = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    (tmp_path / "cloudtrain.toml").write_text("\n".join(["[targets.cluster]", *rows]))
    slurm.ask("scontrol", "update", "PartitionName=high", "MaxTime=60")
    try:
        run = Submitter("cluster", watch=False).submit("job.yaml")
        Watcher(run.store, run.run_id).refresh()
        assert "limits.max_runtime" in run.record.status.reason, "PartitionConfig at first, later PartitionTimeLimit"
        assert (
            run.record.status.reason.startswith("Slurm: Partition")
            and "it will not start by" in run.record.status.reason
        )
        run.cancel()
        assert main(["doctor", "cluster", "--job", "job.yaml"]) == 0
        plan = Submitter("cluster").plan("job.yaml")
        (note,) = [text for text in plan.notes if "doctor" in text]
        assert note.startswith("partition high allows 1h (doctor, ") and "runs in 3 slices of at most 55m" in note
        assert "--time=60" in plan.request["sbatch"]
        slurm.ask("scontrol", "update", "PartitionName=high", "MaxTime=8")  # too short for slices
        capsys.readouterr()
        assert main(["doctor", "cluster", "--job", "job.yaml"]) == 1
        found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM")]
        assert len(found) == 1 and "partition high allows 8m" in found[0] and "it would never start" in found[0]
    finally:
        slurm.ask("scontrol", "update", "PartitionName=high", "MaxTime=UNLIMITED")


def test_the_end_of_a_loss_is_known_once_all_nodes_have_reported_theirs():
    lost = {"state": "LOST", "started_at": "1", "ended_at": "3", "reason": "no progress"}
    done, runs = lost | {"state": "SUCCEEDED", "ended_at": "4"}, {"state": "RUNNING", "started_at": "1"}

    def merged(second: dict):
        return status.merge_nodes({"node-0/status.json": json.dumps(lost), "node-1/status.json": json.dumps(second)})

    assert (merged(done).state, merged(done).event, merged(done).ended_at) == (State.LOST, ENDED, "4")
    assert (merged(runs).state, merged(runs).event) == (State.LOST, "")
