"""How much a platform that answers nothing delays the states of another's runs; a part of watcher.py.

Both are Vertex AI simulators, two projects to one watcher.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from measure import Gates, Rows, wait_until, watchers

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.http import Fault
from cloudtrain.simulators.vertex.lifecycle import Behavior
from cloudtrain.simulators.vertex.server import Simulator

RUNS = 10  # of each platform
MOST_S = 2.0
STATES = {"RUNNING": State.RUNNING, "CANCELLING": State.STOPPING}


def hang(folder: Path, seconds: float) -> tuple[Rows, Gates]:
    """Measure the delay of states for so long, first while both platforms answer, then while one hangs as long."""
    home = folder / "hung"
    with (
        Simulator(folder / "answers", behavior=Behavior(execute=False)) as answers,
        Simulator(folder / "hangs", behavior=Behavior(execute=False)) as hangs,
    ):
        runs = [submit(folder, home, answers) for _ in range(RUNS)]
        others = [submit(folder, home, hangs) for _ in range(RUNS)]
        store = Store(home)
        wait_until(lambda: all(store.watched(run.run_id) for run in (*runs, *others)), "a watcher")
        before = longest_delay_s(answers, runs, seconds)
        hangs.faults += [Fault(method, "", status=0, times=1_000_000, delay_s=seconds) for method in ("GET", "POST")]
        asked = len(hangs.server.requests)
        wait_until(lambda: len(hangs.server.requests) > asked, "a call that hangs")
        meanwhile = longest_delay_s(answers, runs, seconds)
        for pid in watchers(home):
            os.kill(pid, signal.SIGKILL)
    rows: Rows = [
        (f"runs of each of two platforms, one of which hangs for {seconds:.0f} s", RUNS),
        ("a state of the other is in the history after, s, at most: before", f"{before:.2f}"),
        ("the same meanwhile", f"{meanwhile:.2f}"),
    ]
    return rows, [("a platform that hangs delays a state of another by, s", meanwhile - before, MOST_S)]


def submit(folder: Path, home: Path, simulator: Simulator) -> Run:
    place = {"project": "local", "bucket": "local", "endpoint": simulator.url, "image": "any:1", "client": "rest"}
    job = {"source": str(folder / "source"), "entrypoint": "train.py", "environment": {"requirements": "none"}}
    return Submitter("vertex", home=home, **place).submit(job, new=True)


def longest_delay_s(simulator: Simulator, runs: list[Run], seconds: float) -> float:
    """Change the states of all runs again and again, and return the longest time until the history has one."""
    end, longest = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        for name, state in STATES.items():
            began = time.monotonic()
            for run in runs:
                job = str(run.attempts[-1].handle).rpartition("/")[2]
                simulator.jobs.change(job, state=f"JOB_STATE_{name}", startTime="2026-01-01T00:00:00Z")
            wait_until(lambda state=state: {run.record.status.state for run in runs} == {state}, "states", pause_s=0.01)
            longest = max(longest, time.monotonic() - began)
    return longest
