"""A followed run on a real Slurm: how often squeue is called, counted by a wrapper on PATH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs import asked
from tests.backends.slurm.test_quickstart import ROOT, cloudtrain
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


def test_squeue_is_called_once_in_five_seconds_for_all_readers(
    slurm: Slurm, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config" / "cloudtrain"
    config.mkdir(parents=True)
    options = {"backend": "slurm", "folder": str(slurm.shared), "python": sys.executable}
    rows = ["[targets.cluster]", *(f"{name} = {json.dumps(value)}" for name, value in options.items())]
    (config / "cloudtrain.toml").write_text("\n".join(rows))
    wrapper, calls = tmp_path / "shims" / "squeue", tmp_path / "calls"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which("squeue")} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
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
    time.sleep(2 * asked.FRESH_S)  # what is asked more often because something has changed is over

    began, before = time.monotonic(), len(calls.read_text().splitlines())
    cloudtrain("ls")
    cloudtrain("show", run_id)
    time.sleep(3 * asked.FRESH_S)
    number, seconds = len(calls.read_text().splitlines()) - before, time.monotonic() - began
    gate.touch()
    assert follower.wait(2 * WAIT_S) == 0
    assert 1 <= number <= 1 + seconds / asked.FRESH_S, f"{number} calls of squeue in {seconds:.1f} s"
    numbers = [int(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("line ")]
    assert numbers == list(range(len(numbers)))
