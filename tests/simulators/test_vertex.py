"""The simulator is believed because Google's own SDK agrees with it, by a script that imports nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.simulators.vertex import Simulator

SCRIPT = Path(__file__).with_name("googles.py")


@pytest.mark.train
def test_googles_sdk_agrees_with_it(tmp_path: Path):
    assert "cloudtrain" not in SCRIPT.read_text()
    with Simulator(tmp_path) as simulator:
        command = [sys.executable, str(SCRIPT), simulator.url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=dict(os.environ))
    assert done.stdout.strip().endswith("\nall of it"), done.stdout + done.stderr
