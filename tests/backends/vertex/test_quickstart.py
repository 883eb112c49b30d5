"""The quickstart on Vertex AI by the command line: vertex-local as its guide has it, and `-t vertex` with both clients.

Every command is a process of its own, and so is the simulator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain import events
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.simulators import replicas
from tests.backends.slurm.test_quickstart import ROOT, SETS, STEPS
from tests.backends.vertex.test_local import end_simulator
from tests.conftest import WAIT_S, wait_for

pytestmark = [pytest.mark.train, pytest.mark.timeout(1200)]
JOB = "examples/quickstart/job.yaml"
SMALL = [word for pair in SETS for word in ("--set", pair)]
SPOT = [*SMALL, "--set", "resources.use_spot=true"]
# Serves until its standard input is closed: nothing is left when a test dies.
SERVE = (
    "import sys; from pathlib import Path; from cloudtrain.simulators.vertex.server import Simulator\n"
    "with Simulator(Path(sys.argv[1])) as simulator: print(simulator.url, flush=True); sys.stdin.read()"
)


def cloudtrain(*words: str, home: Path | None = None, code: int = 0) -> str:
    env = {**os.environ, **({"CLOUDTRAIN_HOME": str(home)} if home else {})}
    command = [sys.executable, "-m", "cloudtrain.cli", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=5 * WAIT_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def losses(run: Run) -> dict[int, float]:
    loss_of_step: dict[int, float] = {}
    for point in run.metrics("loss"):
        assert loss_of_step.setdefault(point.step, point.value) == point.value, f"step {point.step} was learned twice"
    return loss_of_step


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, str]]:
    """The command of docs/vertex.md on small data, and what it printed: an unbroken run for the other tests."""
    home = tmp_path_factory.mktemp("vertex-local")
    words = ["submit", JOB, "-t", "vertex-local", "--set", "num_nodes=2", "--set", "processes_per_node=1", "--follow"]
    output = cloudtrain(*words, *SMALL, home=home)
    yield Run.find(home=home), output
    end_simulator(home)


def test_vertex_local_trains_on_two_machines_as_the_guide_says(local: tuple[Run, str], tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "vertex.md").read_text()
    assert (
        "cloudtrain submit quickstart.yaml -t vertex-local --set num_nodes=2 --set processes_per_node=1 --follow"
        in guide
    )
    run, output = local
    assert run.refresh().state is State.SUCCEEDED
    assert "[0:0]" in output and "[1:" in output, "both machines are followed"
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    cloudtrain("fetch", run.run_id, "-o", str(tmp_path), home=run.store.home)
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 10_000


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[str]:
    """The address of a simulator in a process of its own."""
    command = [sys.executable, "-c", SERVE, str(tmp_path / "simulator")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        yield process.stdout.readline().strip()
        process.stdin.close()
        assert process.wait(WAIT_S) == 0
    assert [place for _, place in replicas.list_processes() if place.startswith(str(tmp_path))] == []


def asked(url: str, method: str = "GET") -> dict:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=WAIT_S) as answer:
        return json.load(answer)


def preempted(simulator: str, plan: Path) -> tuple[Run, str]:
    """Submit and follow the plan, and take all machines away behind the twelfth step; return what the follower printed.

    Where the run was faster than we, the job is submitted again.
    """
    words, run_id = [str(plan)], json.loads(plan.read_text())["run_id"]
    for _ in range(3):
        command = [sys.executable, "-m", "cloudtrain.cli", "submit", *words, "--follow"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as follower:
            try:
                run = wait_for(lambda: started(run_id), "its handle")
                wait_for(lambda run=run: seldom(max(losses(run), default=0) >= 12), "twelve steps", 4 * WAIT_S)
                if not run.refresh().state.final:
                    asked(f"{simulator}/simulator/preempt/{run.attempts[0].handle.rpartition('/')[2]}", "POST")
                output, _ = follower.communicate(timeout=5 * WAIT_S)
            finally:
                follower.kill()
        assert follower.returncode == 0, output
        if len(worlds(run)) == 4:
            return run, output
        words, run_id = [JOB, "-t", "prod", *SPOT, "--new"], None
    raise AssertionError("three runs ended before their machines were taken away")


def seldom(value: object) -> object:
    """Return it a little later: the machine has something better to do than to answer us."""
    time.sleep(0.1)
    return value


def started(run_id: str | None) -> Run | None:
    """Return a run, or the newest one, once the platform has accepted it."""
    seldom(None)
    try:
        run = Run.find(run_id)
    except CloudtrainError:
        return None
    return run if run.attempts[0].handle and (run_id or not run.refresh().state.final) else None


def worlds(run: Run) -> list[tuple[int, int]]:
    """What the launchers said at each start: (world size, node rank)."""
    parsed = [events.parse(line.text) for line in run.logs(raw=True) if line.rank == -1]
    return sorted(
        (e[1]["world_size"], e[1]["node_rank"]) for e in parsed if e and e[0] == "world" and "platform" in e[1]
    )


@pytest.mark.usefixtures("census")
@pytest.mark.long
@pytest.mark.parametrize("client", ["rest", "sdk"])
def test_the_same_file_on_vertex(client: str, simulator: str, local: tuple[Run, str], tmp_path: Path) -> None:
    config = tmp_path / "config" / "cloudtrain"
    config.mkdir(parents=True)
    options = {"project": "local", "bucket": "local", "image": "any:1", "endpoint": simulator, "client": client}
    lines = [
        "[targets.prod]",
        'backend = "vertex"',
        "settle_s = 1",
        *(f'{n} = "{text}"' for n, text in options.items()),
    ]
    (config / "cloudtrain.toml").write_text("\n".join(lines))

    plan = tmp_path / "plan.json"
    cloudtrain("plan", JOB, "-t", "prod", *SPOT, "-o", str(plan))
    jobs = f"{simulator}/v1/projects/local/locations/us-central1/customJobs"
    assert asked(jobs) == {}, "a plan creates nothing"
    run, followed = preempted(simulator, plan)
    assert worlds(run) == [(2, 0), (2, 0), (2, 1), (2, 1)], "two starts of two machines"
    assert len(run.attempts) == 1 and run.attempts[0].status.state is State.SUCCEEDED
    assert followed.count("[0:") > 2 and followed.count("[1:") > 2
    unbroken = losses(local[0])
    assert losses(run) == unbroken, "a Spot loss changes no loss, and one file learns the same in both places"
    out = tmp_path / "out"
    cloudtrain("fetch", run.run_id, "-o", str(out))
    assert (out / "model" / "model.safetensors").stat().st_size > 10_000 and list(out.rglob("COMPLETE"))

    stopped = json.loads(cloudtrain("submit", JOB, "-t", "prod", *SPOT, "--new", "--json"))
    begun = Run.find(stopped["run_id"])
    wait_for(lambda: seldom(next(begun.logs(raw=True), None)), "its first line")
    cloudtrain("cancel", stopped["run_id"])
    cloudtrain("wait", stopped["run_id"], code=130)
    assert asked(f"{simulator}/v1/{stopped['handle']}")["state"] == "JOB_STATE_CANCELLED"
    attempts = [job["labels"]["cloudtrain_attempt"] for job in asked(jobs)["customJobs"]]
    assert len(attempts) == len(set(attempts))
