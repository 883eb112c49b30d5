"""A sweep of a small script on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.clock import SYSTEM
from cloudtrain.job.job import read as read_yaml
from cloudtrain.nodes.process import Process
from cloudtrain.sweeps.sweep import Sweep, begin
from tests.conftest import WAIT_S, wait_for

# Says its loss at each of its steps; a bad learning rate fails. Each start leaves a line with its trial.
SCRIPT = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--gate", default="")
given = parser.parse_args()
with open(os.environ["STARTS"], "a") as file:
    file.write(os.environ["SWEEP_TRIAL"] + "\\n")
for step in range(1, given.steps + 1):
    print(json.dumps({"step": step, "loss": abs(given.lr - 0.5) + 1 / step}), flush=True)
if given.lr < 0:
    sys.exit("this rate cannot be")
while given.gate and not pathlib.Path(given.gate).exists():
    time.sleep(0.05)
pathlib.Path(os.environ["CLOUDTRAIN_MODEL_DIR"], "rate").write_text(str(given.lr))
"""
Start = Callable[..., Sweep]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    job = f"name: tune\nentrypoint: train.py\nenvironment: {{requirements: none}}\nenv: {{STARTS: {tmp_path / 'starts'}}}\n"
    (folder / "job.yaml").write_text(job)
    return folder


@pytest.fixture
def start(project: Path, home: Path, census: Path):
    """Return a function that starts a sweep of grid points over lr; none of its processes outlives the test."""
    started: list[Sweep] = []

    def start(lr: list[float], text: str = "", gate: Path | None = None) -> Sweep:
        more = f", gate: {{value: {gate}}}" if gate else ""
        keys = (
            f"job: job.yaml\nmethod: grid\nmetric: {{name: loss}}\nparameters: {{lr: {{values: {lr}}}{more}}}\n{text}\n"
        )
        started.append(begin(read_yaml(keys)[0].value, project, home=home))
        return started[-1]

    yield start
    for sweep in started:
        if sweep.sweep_id in {record.sweep_id for record in sweep._history.sweeps()}:  # else the test has removed it
            if sweep.record.live:
                sweep._history.set_state(sweep.sweep_id, "RUNNING", old=("PAUSED",))
                sweep.stop()
            sweep.wait(WAIT_S)
        wait_for(lambda sweep=sweep: not drivers(sweep), "the end of its process")


def drivers(sweep: Sweep) -> list[int]:
    """Return the processes that drive a sweep."""
    shown = subprocess.run(
        ["pgrep", "-f", f"cloudtrain.sweeps.drive .* {sweep.sweep_id}"], capture_output=True, text=True
    )
    return [int(word) for word in shown.stdout.split()]


def kill_clients(sweep: Sweep, home: Path) -> None:
    """Kill what drives a sweep and what watches its runs; the jobs themselves live on."""
    holder = sweep.run(sweep.trials[0]).store.watcher() if sweep.trials and sweep.trials[0].run_id else None
    process = Process.parse(holder.owner) if holder else None
    for pid in [*drivers(sweep), *([process.pid] if process and process.alive else [])]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_for(lambda: not sweep.record.is_driven(SYSTEM), "the end of what was killed")


def starts(tmp_path: Path) -> list[dict]:
    """Return the parameters of each start of the script, in no order."""
    path = tmp_path / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def command(project: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain", *words], cwd=project, capture_output=True, text=True, timeout=2 * WAIT_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout
