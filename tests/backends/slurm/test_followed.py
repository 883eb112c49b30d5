"""How often squeue of a real Slurm is called, counted by a wrapper on PATH."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from cloudtrain.history.spool import FRESH_S, OLD_FRESH_S, Spool
from cloudtrain.history.store import Store
from cloudtrain.job.units import format_time
from cloudtrain.nodes.process import Process
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.scheduler import Multiplexer
from cloudtrain.testing.clock import VirtualClock
from tests.backends.slurm.test_backend import count_calls
from tests.backends.slurm.test_quickstart import ROOT, cloudtrain
from tests.backends.slurm.test_statuses import HELD
from tests.conftest import WAIT_S, wait_for
from tests.lab.slurm import Slurm

pytestmark = pytest.mark.usefixtures("census")
SCRIPT = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1]):
    print("line", number, flush=True)
    number += 1
    time.sleep(0.05)
"""


@pytest.mark.long
def test_squeue_is_called_once_in_five_seconds_for_all_readers(
    slurm: Slurm, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config" / "cloudtrain"
    config.mkdir(parents=True)
    options = {"backend": "slurm", "folder": str(slurm.shared), "python": sys.executable}
    rows = ["[targets.cluster]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]
    (config / "cloudtrain.toml").write_text("\n".join(rows))
    calls = count_calls(tmp_path / "counted", monkeypatch, "squeue")
    script, gate, log = tmp_path / "project" / "train.py", slurm.shared / "gate", tmp_path / "followed.log"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    sets = ["--set", "environment.requirements=none"]
    with log.open("wb") as file:
        words = ["submit", str(script), "-t", "cluster", "-f", *sets, "--", str(gate)]
        follower = subprocess.Popen([sys.executable, "-m", "cloudtrain.cli", *words], cwd=ROOT, stdout=file)
    wait_for(lambda: log.exists() and log.read_bytes().count(b"line ") > 20, "its lines", 2 * WAIT_S)
    run_id = Store(home).find(None).run_id
    wait_for(lambda: Store(home).find(run_id).status.state.value == "RUNNING", "its state")
    last = tmp_path / "counted" / "log"  # it is asked more often because something has changed
    wait_for(lambda: time.time() - last.stat().st_mtime > 0.8 * FRESH_S, "the pause between two calls")
    began, before = time.monotonic(), calls()
    cloudtrain("ls")
    cloudtrain("show", run_id)
    time.sleep(2 * FRESH_S)
    number, seconds = calls() - before, time.monotonic() - began
    gate.touch()
    assert follower.wait(2 * WAIT_S) == 0
    made = [slurm.shared / "runs" / run_id, *(slurm.shared / "runs" / run_id).rglob("*")]
    assert [path for path in made if path.lstat().st_mode & 0o077 and not path.is_symlink()] == [], "private"
    assert 1 <= number <= 1 + seconds / FRESH_S, f"{number} calls of squeue in {seconds:.1f} s"
    numbers = [int(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("line ")]
    assert numbers == list(range(len(numbers)))


def call_times(runs: Multiplexer, clock: VirtualClock, seconds: float, calls: Callable[[], int]) -> list[float]:
    """Watch runs for so long by the clock, and return when something was called."""
    times: list[float] = []
    end = clock.monotonic() + seconds
    while clock.monotonic() < end:
        runs.turn(0.0)
        if any(group.running or group.asking for group in runs._groups.values()):
            time.sleep(0.005)
            clock.sleep(0.0)  # a thread that looks may wait by the clock
        else:
            times += [clock.monotonic()] * (calls() - len(times))
            clock.sleep(max(runs._next_s(), 0.01))
    return times


@pytest.mark.parametrize(("count", "age_s", "period_s"), [(1, 0.0, FRESH_S), (50, 3600.0, OLD_FRESH_S)])
def test_squeue_is_called_once_in_a_period_for_all_runs(
    slurm: Slurm, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, age_s: float, period_s: float
) -> None:
    """One run that is followed, and 50 that are older than 10 minutes."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print(1)")
    options = {"folder": str(slurm.shared), "python": sys.executable, "directives": ["--hold"]}
    submitter = Submitter("slurm", watch=False, **options)
    job = {"source": str(tmp_path / "source"), "entrypoint": "train.py", "environment": {"requirements": "none"}}
    ids = [submitter.submit(job, new=True).run_id for _ in range(count)]
    with Store(home).database.write() as db:
        db.execute("UPDATE attempts SET created_at = ?", (format_time(time.time() - age_s),))
    calls = count_calls(tmp_path / "counted", monkeypatch, "squeue")
    clock = VirtualClock(time.time())
    if count == 1:
        monkeypatch.setattr(Spool, "is_followed", lambda spool: True)
    runs = Multiplexer(home, Process.here(), clock=clock)
    for run_id in ids:
        runs.add(run_id, None)
    settled = clock.monotonic() + 2 * period_s  # it is asked more often because the watcher has just begun
    gaps = [after - at for at, after in pairwise(call_times(runs, clock, 8 * period_s, calls)) if at > settled]
    assert len(gaps) >= 4 and period_s <= min(gaps) <= max(gaps) < 1.1 * period_s, gaps
    assert {run.status.reason for run in Store(home).runs(limit=count)} == {HELD}
    slurm.ask("scancel", "--user=root")
