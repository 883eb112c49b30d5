"""How a Slurm job may end: preempted and started again, cancelled from outside, its node lost, its limit over, never begun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from cloudtrain.backends.slurm import reasons
from cloudtrain.backends.slurm.backend import SlurmBackend
from cloudtrain.diagnosis.judge import judge
from cloudtrain.diagnosis.verdict import End
from cloudtrain.errors import BackendError
from cloudtrain.events import PLATFORM, State, Status
from cloudtrain.job.job import Job
from cloudtrain.source.bundle import Bundle
from tests.conftest import wait_for
from tests.lab.slurm import Slurm

# Counts its starts in the run's folder, waits for SIGTERM, and leaves with 75, until it was started often enough.
PATIENT = """
import os, pathlib, sys, time
import cloudtrain_runtime as runtime
runtime.install()
run = runtime.context()
starts = pathlib.Path(run.checkpoint_dir, f"starts-{run.rank}")
count = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(count))
print("start", count, "of", run.rank, "in a world of", run.world_size, flush=True)
while count < int(sys.argv[1]):
    time.sleep(0.05)
    if runtime.stop_requested():
        print("leaving", run.rank, flush=True)
        runtime.exit_resumable()
print("done", run.rank, flush=True)
"""


class Cluster:
    """Submits scripts to the lab's Slurm."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder, self.count = slurm, folder, 0
        self.handles: list[tuple[SlurmBackend, str]] = []

    def backend(self, **options) -> SlurmBackend:
        given = {"folder": str(self.slurm.shared), "python": sys.executable, **options}
        SlurmBackend.options().model_validate(given)
        return SlurmBackend(given, self.folder / "work")

    def plan(self, script: str, *args: object, options: dict | None = None, attempt: int = 1, **job):
        """Return the backend, the plan and the bundle of a script."""
        self.count += 1
        source = self.folder / f"source-{self.count}"
        source.mkdir()
        (source / "script.py").write_text(script)
        data = {"name": "ends", "source": str(source), "entrypoint": "script.py", "args": list(map(str, args))}
        backend = self.backend(**options or {})
        bundle = Bundle.make(source, self.folder / "bundles")
        return backend, backend.plan(Job.from_dict({**data, **job}), bundle, f"ends-{token_hex(4)}", attempt), bundle

    def submit(self, script: str, *args: object, **changes) -> tuple[SlurmBackend, str]:
        backend, plan, bundle = self.plan(script, *args, **changes)
        handle = backend.submit(plan, bundle)
        self.handles.append((backend, handle))
        return backend, handle


@pytest.fixture
def cluster(slurm: Slurm, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(slurm, tmp_path)
    yield made
    for backend, handle in made.handles:
        backend.cancel(handle)


def said(backend: SlurmBackend, handle: str) -> list[str]:
    return [line.text for line in backend.logs(handle) if line.rank >= 0]


def platform_lines(backend: SlurmBackend, handle: str) -> list[str]:
    """Return what setup lines and srun printed."""
    found = [line for line in backend.logs(handle) if line.node == PLATFORM]
    assert [line.seq for line in found] == list(range(len(found))) and all(line.rank == -1 for line in found)
    return [line.text for line in found]


def final(backend: SlurmBackend, handle: str) -> Status:
    wait_for(lambda: backend.status(handle).state.final, "the end")
    return backend.status(handle)


def job_of(handle: str) -> str:
    return Path(handle, "job").read_text().strip()


def lines(word: str, backend: SlurmBackend, handle: str) -> Callable[[], int]:
    return lambda: sum(line.startswith(word) for line in said(backend, handle))


def test_preempted_requeued_resumed_and_then_no_more(cluster: Cluster) -> None:
    slurm = cluster.slurm
    spot = {"options": {"spot_partition": "low"}, "resources": {"use_spot": True}, "num_nodes": 2}
    backend, handle = cluster.submit(PATIENT, 2, retry={"max_attempts": 2}, **spot)
    wait_for(lambda: lines("start 1", backend, handle)() == 2, "both ranks")
    slurm.ask("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    wait_for(lambda: lines("leaving", backend, handle)() == 2, "the notice")
    wait_for(lambda: backend.status(handle).state is State.QUEUED, "the queue again")
    assert not backend.status(handle).state.final, (
        "what stopped says that it was preempted, and must not speak for the run"
    )
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0)
    assert "Restarts=1" in slurm.ask("scontrol", "-o", "show", "job", job_of(handle))
    for node in (0, 1):
        assert '"PREEMPTED"' in Path(handle, f"node-{node}", "status.json.0").read_text(), (
            "put aside before the restart"
        )
        numbers = [line.seq for line in backend.logs(handle) if line.node == node]
        assert numbers == list(range(len(numbers))), "numbers go on over a restart"
        own = [line.text for line in backend.logs(handle) if line.node == node and line.rank >= 0]
        world = f"of {node} in a world of 2"
        assert own == [f"start 1 {world}", f"leaving {node}", f"start 2 {world}", f"done {node}"]

    # The same without a restart left: the attempt ends PREEMPTED, for the client to go on from.
    backend, handle = cluster.submit(PATIENT, 2, retry={"max_attempts": 1}, **spot)
    wait_for(lambda: lines("start 1", backend, handle)() == 2, "both ranks")
    slurm.ask("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.PREEMPTED, None)


@pytest.mark.long
def test_a_max_runtime_in_slices(cluster: Cluster) -> None:
    """One job, put back into the queue at the end of each slice; a script of one's own gets the signal and resumes."""
    limits, options = {"max_runtime": "1h"}, {"slice": "20s"}
    backend, handle = cluster.submit(PATIENT, 2, num_nodes=2, limits=limits, options=options)
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0)
    assert "Restarts=1" in cluster.slurm.ask("scontrol", "-o", "show", "job", job_of(handle))
    for node in (0, 1):
        own = [line.text for line in backend.logs(handle) if line.node == node and line.rank >= 0]
        world = f"of {node} in a world of 2"
        assert own == [f"start 1 {world}", f"leaving {node}", f"start 2 {world}", f"done {node}"]
    assert Path(handle, "slices").read_text().split()[0] == "1"


def test_cancelled_from_outside_is_neither_preempted_nor_started_again(cluster: Cluster) -> None:
    backend, handle = cluster.submit(PATIENT, 9, num_nodes=2, retry={"max_attempts": 3})
    wait_for(lambda: lines("start 1", backend, handle)() == 2, "both ranks")
    cluster.slurm.ask("scancel", job_of(handle))
    status = final(backend, handle)
    assert (status.state, status.exit_code, status.reason) == (State.CANCELLED, None, "cancelled with scancel")
    assert lines("leaving", backend, handle)() == 2, "they had time to save"
    cluster.slurm.ready()
    assert backend.status(handle).state is State.CANCELLED
    # one that waits
    backend, handle = cluster.submit(PATIENT, 9, num_nodes=2, options={"directives": ["--begin=now+1hour"]})
    assert backend.status(handle) == Status(State.QUEUED, None, reasons.describe("BeginTime"))
    backend.cancel(handle)
    assert final(backend, handle).state is State.CANCELLED
    assert backend.find(f"{Path(handle).parent.name}-a1") == handle
    # our own cancel of ranks that leave with 0 or an error is CANCELLED, whatever Slurm makes of it
    stubborn = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    backend, handle = cluster.submit(stubborn)
    wait_for(lambda: lines("up", backend, handle)(), "its line")
    backend.cancel(handle)
    assert final(backend, handle).state is State.CANCELLED


def test_a_lost_node_ends_the_attempt_and_the_next_one_goes_on(cluster: Cluster) -> None:
    slurm = cluster.slurm
    backend, handle = cluster.submit(PATIENT, 2, num_nodes=2, retry={"max_attempts": 2})
    wait_for(lambda: lines("start 1", backend, handle)() == 2, "both ranks")
    slurm.nodes[1].power_off()
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.LOST, None)
    assert "node 1 (node-3) was lost" in status.reason
    backend.cancel(handle)  # as the watcher does before the next attempt
    assert backend.status(handle).state is State.LOST
    slurm.nodes[1].reboot()
    slurm.ready()
    assert backend.status(handle).state is State.LOST, "and it stays lost: Slurm has not started it again"
    assert slurm.ask("squeue", "-h") == ""


@pytest.mark.long
def test_a_lost_node_that_no_client_hears_of(cluster: Cluster, figure: Callable[[str, object], None]) -> None:
    """With every client asleep the job is requeued all the same: by its script, or by Slurm when that died too."""
    for number in (1, 0):
        backend, handle = cluster.submit(PATIENT, 2, num_nodes=2, retry={"max_attempts": 2})
        wait_for(lambda: lines("start 1", backend, handle)() == 2, "both ranks")
        cluster.slurm.nodes[number].power_off()
        since = time.monotonic()
        wait_for(
            lambda: "Restarts=1" in cluster.slurm.ask("scontrol", "-o", "show", "job", job_of(handle)), "a restart"
        )
        figure(f"seconds from the power-off of node {number} to the requeue", round(time.monotonic() - since, 1))
        cluster.slurm.nodes[number].reboot()
        wait_for(lambda: lines("done", backend, handle)() == 2, "the end")
        assert final(backend, handle).state is State.SUCCEEDED
        assert lines("start 2", backend, handle)() == 2


def test_reasons_before_training(cluster: Cluster) -> None:
    with pytest.raises(BackendError, match="Slurm refuses the job: .*partition") as caught:
        cluster.submit("print(1)", options={"partition": "nowhere"})
    assert "sinfo" in caught.value.hint
    backend, handle = cluster.submit("print(1)", options={"setup": ["export A=1", "echo no module cuda/99 >&2; false"]})
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    sentence = "this setup line failed: echo no module cuda/99 >&2; false"
    assert status.reason == f"{sentence} (no module cuda/99)"
    assert platform_lines(backend, handle) == ["no module cuda/99", sentence]
    assert judge(End.from_status(status, None), backend.logs(handle)).label == "setup-line"
    backend, handle = cluster.submit("print(1)", options={"python": "/no/such/python"})
    status = final(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 127) and "/no/such/python" in status.reason
    assert [text for text in platform_lines(backend, handle) if "/no/such/python" in text], "bash said so, through srun"
    odd = f'{cluster.slurm.shared}/it\'s 100%j "odd" $1'
    script = "import os; print(os.environ['SEEN'], os.getcwd())"
    backend, handle = cluster.submit(script, num_nodes=2, options={"folder": odd, "setup": ["export SEEN='a b'"]})
    assert final(backend, handle).state is State.SUCCEEDED
    assert said(backend, handle) == [f"a b {handle}/source"] * 2 and handle.startswith(f"{odd}/runs/")
    assert platform_lines(backend, handle) == []


def test_of_the_folder_that_all_nodes_share_there_is_one_copy(cluster: Cluster) -> None:
    backend, handle = cluster.submit("import os; open('of-rank-' + os.environ['RANK'], 'w').write('x')", num_nodes=2)
    assert final(backend, handle).state is State.SUCCEEDED
    outputs = Path(handle).parent / "outputs"
    found = sorted(str(path.relative_to(outputs)) for path in outputs.rglob("*") if path.is_file())
    assert found == ["of-rank-0", "of-rank-1"]


@pytest.mark.parametrize("denied", [("squeue", "sacct"), ("scontrol", "sacct"), ("squeue", "scontrol", "sacct")])
def test_sites_that_deny_commands(cluster: Cluster, denied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site may allow only some of Slurm's commands; sacct never answers here, there is no slurmdbd."""
    backend, handle = cluster.submit(PATIENT, 9)
    wait_for(lines("start 1", backend, handle), "its start")
    shims = tmp_path / "shims"
    shims.mkdir()
    for name in denied:
        if name != "sacct":
            (shims / name).write_text("#!/bin/sh\necho 'not allowed on this cluster' >&2\nexit 1\n")
            (shims / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}:{os.environ['PATH']}")
    if len(denied) == 3:
        with pytest.raises(BackendError, match="Slurm's commands do not run: squeue: not allowed.*scontrol.*sacct"):
            backend.status(handle)
        (shims / "squeue").unlink()
    assert backend.status(handle).state is State.RUNNING
    backend.cancel(handle)
    assert final(backend, handle).state is State.CANCELLED


def test_arguments_of_srun_reach_the_tasks(cluster: Cluster) -> None:
    prolog = cluster.slurm.shared / "prolog"
    prolog.write_text("#!/bin/sh\necho export FROM_PROLOG=seen\n")
    prolog.chmod(0o755)
    script = "import os\nprint('prolog', os.environ.get('FROM_PROLOG'), flush=True)\n"
    arguments = [f"--task-prolog={prolog}", "--mpi=pmi2", "--cpu-bind=verbose,cores"]
    setup = ["echo from setup; export SEEN=1"]
    backend, handle = cluster.submit(script, options={"srun_args": arguments, "setup": setup})
    assert final(backend, handle).state is State.SUCCEEDED
    assert said(backend, handle) == ["prolog seen"]
    assert platform_lines(backend, handle)[0] == "from setup"
    first = next(iter(backend.logs(handle)))
    assert (first.text, list(backend.logs(handle, after=first.cursor))) == (
        "from setup",
        list(backend.logs(handle))[1:],
    )
