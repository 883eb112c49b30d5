"""Law 3: the real command line is killed at every step of a submit, and run again: one attempt exists, and it succeeds.

The steps are the calls by which it changes anything outside itself, found by tracing (strace), not listed by hand: files
written, renamed and synced, processes started, lines printed. SIGKILL is sent on entry, so that step N is not done and all
before it are: before N and after N-1.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, require

pytestmark = pytest.mark.usefixtures("census")
CALLS = (
    "write,pwrite64,pwritev,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,link,linkat,fsync,fdatasync,ftruncate,"
    "clone,clone3,vfork,fork,sendto,connect"
)
SUBMIT = [sys.executable, "-B", "-m", "cloudtrain.cli", "submit", "once.py"]
SCRIPT = "import os\nprint('ran in', os.environ['CLOUDTRAIN_ATTEMPT_ID'], flush=True)\n"
SHARDS = 2
ROOT = Path(__file__).parents[2]
STRIDE = 40  # in CI every fortieth step; all of them in make test-long


@pytest.fixture
def project(tmp_path: Path) -> Path:
    require("strace")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "once.py").write_text(SCRIPT)
    return folder


def traced(project: Path, home: Path, *inject: str) -> subprocess.CompletedProcess[str]:
    trace = ["strace", "-qq", "-e", f"trace={CALLS}", *inject, *SUBMIT]
    env = {**os.environ, "CLOUDTRAIN_HOME": str(home)}
    return subprocess.run(trace, cwd=project, env=env, capture_output=True, text=True, timeout=WAIT_S)


class Step(NamedTuple):
    """A call of a submit: its line in the trace, and how many calls of its name were made until then."""

    line: str
    name: str
    count: int  # strace's when= counts the calls of each name by themselves


def steps(project: Path, tmp_path: Path) -> list[Step]:
    """Return the calls of a whole submit."""
    log = tmp_path / "trace"
    ended = traced(project, tmp_path / "counted", "-o", str(log))
    assert ended.returncode == 0, ended.stderr
    Run.find(home=tmp_path / "counted").wait(WAIT_S)
    made: Counter[str] = Counter()
    found = []
    for line in log.read_text().splitlines():
        if name := re.match(r"\w+(?=\()", line):
            made[name[0]] += 1
            found.append(Step(line, name[0], made[name[0]]))
    return found


def kill(project: Path, home: Path, step: Step) -> str | None:
    """Submit until a step, on entry to which the process is killed, and return what it printed; None where it made
    fewer of these calls: a process that it started has cached some bytecode before."""
    inject = f"inject={step.name}:signal=SIGKILL:when={step.count}"
    killed = traced(project, home, "-o", "/dev/null", "-e", inject)
    assert killed.returncode in (0, -signal.SIGKILL), f"{step}: {killed}"
    return killed.stdout if killed.returncode else None


def kill_and_run_again(project: Path, home: Path, step: Step) -> bool:
    """Kill a submit at one step, submit again, and look at what there is; False where it did not die."""
    printed = kill(project, home, step)
    if printed is None:
        return False
    told = re.search(r"^once-\S+", printed, re.MULTILINE)
    env = {**os.environ, "CLOUDTRAIN_HOME": str(home)}
    again = subprocess.run(SUBMIT, cwd=project, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert again.returncode == 0, f"step {step}: {again.stdout}{again.stderr}"
    store = Store(home)
    runs = [Run(record.run_id, store) for record in store.runs()]
    for run in runs:
        status = run.wait(WAIT_S)
        lines = [line.text for line in run.logs() if line.rank == 0]
        assert status.state is State.SUCCEEDED, f"step {step}: {status} {lines}"
        assert lines == [f"ran in {run.run_id}-a1"], f"step {step}"
        assert len(run.attempts) == 1
    if len(runs) > 1:  # only one that was told to the person whole, and written down as told, is followed by a new one
        assert len(runs) == 2 and told and store.find(told[0]).acknowledged, (
            f"step {step}, two wishes: {[(r.run_id, r.identity, r.acknowledged) for r in store.runs()]}\n"
            f"{[attempt.plan.bundle for run in runs for attempt in store.attempts(run.run_id)]}"
        )
    return True


def test_a_killed_submit_is_adopted_after_an_upgrade(project, tmp_path):
    step = next(step for step in steps(project, tmp_path) if step.name == "mkdir" and "/runs" in step.line)
    home = tmp_path / "home"
    assert kill(project, home, step) == ""
    upgraded = tmp_path / "upgraded"
    for name in ("cloudtrain", "entrypoints"):
        shutil.copytree(ROOT / name, upgraded / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (upgraded / "entrypoints" / "launch.py").open("a") as launcher:
        launcher.write("# of the next release\n")
    env = {**os.environ, "CLOUDTRAIN_HOME": str(home), "PYTHONPATH": str(upgraded)}
    again = subprocess.run(SUBMIT, cwd=project, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert again.returncode == 0, again.stderr
    store = Store(home)
    (record,) = store.runs()
    assert re.match(rf"{record.run_id}\b", again.stdout)
    (attempt,) = store.attempts(record.run_id)
    digests = {path.name.partition(".")[0] for path in (home / "bundles").glob("*.tar.gz")}
    assert len(digests) == 2 and attempt.plan.bundle["sha256"] in digests, "the second submit was not of another bundle"
    assert Run(record.run_id, store).wait(WAIT_S).state is State.SUCCEEDED


def shard(project: Path, tmp_path: Path, number: int, stride: int) -> int:
    """Kill a submit at every drawn step, or at the last one before it that it reaches, and return how often."""
    calls = steps(project, tmp_path)
    chosen = range(number * stride, len(calls), stride * SHARDS)
    died = 0
    for index in chosen:
        earlier = range(index, max(-1, index - 30), -1)
        died += any(kill_and_run_again(project, tmp_path / f"home-{index}-{at}", calls[at]) for at in earlier)
    assert died == len(chosen) > 5
    return died


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_some_steps(project, tmp_path, number, figure):
    figure("steps at which a submit was killed", shard(project, tmp_path, number, STRIDE))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(SHARDS))
def test_killed_at_every_step(project, tmp_path, number, figure):
    figure("steps at which a submit was killed", shard(project, tmp_path, number, 1))
